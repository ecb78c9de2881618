"""What `promote --export` writes must run: the script and the Serve config are started, the LLMConfig is parsed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from orchestrator.config import Experiment
from orchestrator.serving import head
from orchestrator.serving.export import export
from orchestrator.tracking import Recorded
from tests.support.paths import FAKE_ENGINE
from tests.support.stand_in_service import service_experiment, stand_in_result


def exported(experiment: Experiment, folder: Path, env: dict[str, str] | None = None, **args: Any) -> dict[str, Path]:
    result = stand_in_result(experiment, "point", tokens_per_s=300)
    engine = replace(
        result.spec.engine, args={**result.spec.engine.args, **args}, env={**result.spec.engine.env, **(env or {})}
    )
    recorded = Recorded(result=replace(result, spec=replace(result.spec, engine=engine)), run_id="abc123")
    return {path.name: path for path in export(experiment, recorded, folder / "out")}


def models(base_url: str, key: str | None = None, timeout_s: float = 60.0) -> list[str]:
    """Model ids, once the server answers."""
    request = urllib.request.Request(f"{base_url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return [entry["id"] for entry in json.load(answer)["data"]]
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)


def test_the_script_starts_the_engine_on_any_port(tmp_path: Path, free_port: Callable[[], int]) -> None:
    experiment = service_experiment(tmp_path, "plain", 8000)
    settings = {"max-model-len": 4096, "speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}
    files = exported(experiment, tmp_path, {"NOTE": "it's $HOME; `x`", "HF_TOKEN": "hf_secret"}, **settings)
    text = files["serve.sh"].read_text()
    assert "hf_secret" not in "".join(path.read_text() for path in files.values())
    assert os.access(files["serve.sh"], os.X_OK)

    refused = subprocess.run([files["serve.sh"]], capture_output=True, text=True, timeout=20, check=False)
    assert refused.returncode != 0
    assert "HF_TOKEN" in refused.stderr

    port = free_port()
    process = subprocess.Popen(
        [files["serve.sh"]],
        env={**os.environ, "PORT": str(port), "HF_TOKEN": "mine"},
        stdout=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        assert models(f"http://127.0.0.1:{port}") == ["served"]
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"NOTE=it's $HOME; `x`\0" in environment
        assert b"HF_TOKEN=mine\0" in environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    assert '"method": "ngram"' in text or '"method":"ngram"' in text


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_serve_deploy_takes_the_config(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port, api = free_port(), free_port()
    experiment = service_experiment(tmp_path, "deployed", port, gpus=2, api_key_env="DEPLOYED_KEY")
    files = exported(experiment, tmp_path)
    document = json.loads(files["serve.yaml"].read_text())
    ServeDeploySchema.model_validate(document)
    assert document["applications"][0]["deployments"][0]["placement_group_strategy"] == "STRICT_PACK"
    os.environ["DEPLOYED_KEY"] = "sesame"
    try:
        head.start_head(tmp_path / "head", num_gpus=2, dashboard_port=api)
    finally:
        del os.environ["DEPLOYED_KEY"]
    try:
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(files["serve.yaml"])]
        environment = {**os.environ, "RAY_AUTH_MODE": "token"}
        for _ in range(20):
            done = subprocess.run(
                [*command, "-a", f"http://127.0.0.1:{api}"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode == 0:
                break
            time.sleep(1.0)
        assert done.returncode == 0, done.stderr
        assert models(f"http://127.0.0.1:{port}", "sesame", 120) == ["served"]
    finally:
        head.stop_head(tmp_path / "head")


def test_the_llm_config_is_one_that_ray_reads(tmp_path: Path) -> None:
    # The public module wants vLLM installed beside Ray; the class itself does not.
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

    experiment = service_experiment(tmp_path, "llm", 8000, gpus=2)
    document = json.loads(exported(experiment, tmp_path)["serve-llm.yaml"].read_text())
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    config = LLMConfig.model_validate(application["args"]["llm_configs"][0])
    assert config.placement_group_config == {"bundles": [{"CPU": 1, "GPU": 1}] * 2, "strategy": "STRICT_PACK"}
    assert config.engine_kwargs["tensor_parallel_size"] == 2
    assert config.model_id == "served"


@pytest.mark.parametrize("kind", ["sglang", "llamacpp"])
def test_only_vllm_has_an_llm_config(tmp_path: Path, kind: str) -> None:
    experiment = service_experiment(tmp_path, "other", 8000)
    result = stand_in_result(experiment, "point")
    engine = replace(result.spec.engine, kind=kind, command=[sys.executable, str(FAKE_ENGINE), kind], args={})  # type: ignore[arg-type]
    recorded = Recorded(result=replace(result, spec=replace(result.spec, engine=engine)), run_id="abc123")
    names = {path.name for path in export(experiment, recorded, tmp_path / "out")}
    assert names == {"serve.sh", "serve.yaml"}
    told = {"sglang": "${API_KEY:+--api-key", "llamacpp": "Set LLAMA_API_KEY to ask"}
    assert told[kind] in (tmp_path / "out" / "serve.sh").read_text()
