"""The real vLLM (CPU build) behind Serve, asked with the official client: chat, stream, completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import serving_bench as bench

from orchestrator import config, environments, serving, trial
from orchestrator.config import Experiment

ROOT = Path(__file__).parent.parent


def query(experiment: Experiment, model: str) -> None:
    """Everything a user of OpenAI's client does first, against a promoted experiment."""
    with openai.OpenAI(base_url=f"{serving.Deployment(experiment=experiment).url}/v1", api_key="unused") as client:
        assert [entry.id for entry in client.models.list()] == [model]
        messages = [{"role": "user", "content": "Count to three."}]
        chat = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
        assert chat.choices[0].message.content
        assert chat.usage.completion_tokens >= 1
        options = {"include_usage": True}
        pieces = list(
            client.chat.completions.create(
                model=model, messages=messages, max_tokens=16, temperature=0, stream=True, stream_options=options
            )
        )
        text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert text
        assert len(pieces) > 2
        assert pieces[-1].usage.completion_tokens >= 1
        completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
        assert completion.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="x", max_tokens=1)


@pytest.mark.real
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_real_engine_is_promoted_and_answers(tmp_path: Path, free_port: Callable[[], int]) -> None:
    overrides = [
        f"engine.root={ROOT}",
        f"tracking.folder={tmp_path / 'mlruns'}",
        f"serving.port={free_port()}",
        "workloads={talk: {kind: chat, output_tokens: 48, num_prompts: 3, repeats: 2, warmup: 1}}",
        "objective={metric: talk/decode_tok_s}",
        "serving.verify={workload: talk, tolerance: 0.7}",
        "placement.cpus=1",
    ]
    file = tmp_path / "real.yaml"
    file.write_text("defaults: {machine: cpu, engine: vllm-cpu-smollm2}\n", encoding="utf-8")
    (tmp_path / "engine").symlink_to(ROOT / "conf" / "engine")
    (tmp_path / "machine").symlink_to(ROOT / "conf" / "machine")
    experiment = config.load(file, overrides)
    spec = config.trial_spec(experiment, "k2", {}).with_key(environments.engine_version(experiment.engine), None)
    result = trial.run(spec, tmp_path / "trial")
    assert result.status == "complete", (result.reason, result.evidence)
    bench.record(experiment, replace(result, spec=spec))
    said: list[str] = []
    try:
        # Two shared cores: the numbers may be suspect, which is not what this test is about.
        (recorded,) = serving.tracking.last_campaign(experiment)
        report = serving.promote(experiment, run_id=recorded.run_id, force=True, say=said.append)
        assert report.decision == "promoted", (report.reason, said)
        query(experiment, "smollm2-135m")
        status = serving.status(experiment)
        assert status.state is not None
        assert "vllm.entrypoints.openai.api_server" in status.state["command_line"]
    finally:
        serving.stop(experiment)
