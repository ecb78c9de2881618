"""The whole path on the real vLLM (CPU build): tune, results, promote, and OpenAI's client against what is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest
from mlflow import MlflowClient

from tests.support.paths import ROOT

MODEL = "smollm2-135m"


class User:
    """Somebody at the project's folder who types commands; their results go to a folder of the test's own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        # Less work than the quickstart; two shared cores are no place to judge numbers.
        self.overrides = [
            f"tracking.folder={folder}",
            f"serving.port={port}",
            "serving.verify.tolerance=0.9",
            "search.launches=1",
            "workloads.code-review-small.num_prompts=2",
            "workloads.code-review-small.repeats=3",
            "workloads.code-review-small.output_tokens=64",
        ]

    def __call__(self, verb: str, *words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "orchestrator", verb, "conf/quickstart.yaml", *self.overrides, *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=os.environ, check=False
        )
        return done.returncode, done.stdout, done.stderr


def engines_alive() -> list[int]:
    """Real engines of this checkout, whoever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if "vllm.entrypoints.openai.api_server" in process.cmdline() and str(ROOT) in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.real
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_from_a_sweep_to_a_served_champion(tmp_path: Path, free_port: Callable[[], int]) -> None:
    user = User(tmp_path / "mlruns", free_port())
    others = set(engines_alive())
    code, out, err = user("tune", "--json")
    assert code == 0, err
    sweep = json.loads(out)
    assert sorted(trial["name"] for trial in sweep["trials"]) == ["k=2", "k=4", "no-spec"]
    for trial in sweep["trials"]:
        assert trial["status"] == "complete", trial
        measured = trial["measurements"]["code-review-small"]
        assert measured["decode_tok_s"]["value"] > 1
        assert measured["ttft_s"]["value"] > 0
        assert measured["prefix_hit_tokens"]["value"] < measured["prompt_tokens"]["value"] / 4
        speculates = trial["name"] != "no-spec"
        assert (measured["acceptance_rate"] is not None) == speculates
        if speculates:
            assert 0 < measured["acceptance_rate"]["value"] <= 1
            assert len(measured["acceptance_by_position"]) == int(trial["name"][-1])
    assert set(engines_alive()) <= others

    code, out, err = user("results")
    assert code == 0, err
    assert "no-spec" in out
    assert "RSS GiB" in out

    code, out, err = user("promote", "--force", "--json")
    try:
        assert code == 0, err
        promoted = json.loads(out)
        assert promoted["decision"] == "promoted"
        ask_with_the_official_client(user.url)
        code, out, err = user("promote", "--status", "--json")
        assert code == 0, err
        assert "vllm.entrypoints.openai.api_server" in json.loads(out)["state"]["command_line"]
        store = MlflowClient(f"sqlite:///{user.folder}/mlflow.db")
        (name,) = [model.name for model in store.search_registered_models()]
        assert store.get_model_version_by_alias(name, "champion").run_id == promoted["run_id"]
    finally:
        stopped, _, err = user("promote", "--stop")
    assert stopped == 0, err
    assert set(engines_alive()) <= others


def ask_with_the_official_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        assert [entry.id for entry in client.models.list()] == [MODEL]
        messages = [{"role": "user", "content": "Count to three."}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
        chat = client.chat.completions.create(**asked)
        assert chat.choices[0].message.content
        assert chat.usage.completion_tokens >= 1
        pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert len(pieces) > 2
        assert pieces[-1].usage.completion_tokens >= 1
        completion = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0)
        assert completion.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="x", max_tokens=1)
