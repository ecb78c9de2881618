"""The inputs of the H200 experiments: model folder, plugin, and one acceptance curve in every file that uses it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator import config
from orchestrator.engines import ENGINES
from orchestrator.search import space
from tests.support.paths import ROOT

FOLDER = ROOT / "experiments" / "h200-dspark-k-sweep"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
Q = float(re.search(r"\*\*q = ([0-9.]+)\*\*", README)[1])


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mean_length(proposals: int) -> float:
    return 1 + sum(Q**i for i in range(1, proposals + 1))


def points(name: str, monkeypatch: pytest.MonkeyPatch) -> list[config.TrialSpec]:
    monkeypatch.chdir(ROOT)
    specs, skipped = space.points(config.load(ROOT / "conf" / f"{name}.yaml"))
    assert skipped == []
    return specs


@pytest.mark.parametrize("name", ["h200_dspark", "h200x2_dspark"])
def test_every_k_on_vllm_has_the_documented_curve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = {}
    for point in points(name, monkeypatch):
        speculative = point.engine.args["speculative-config"]
        if speculative is None:
            continue
        k, rates = speculative["num_speculative_tokens"], speculative["synthetic_acceptance_rates"]
        assert len(rates) == k
        assert rates == pytest.approx([Q**i for i in range(1, k + 1)], abs=1e-4)
        plan = ENGINES["vllm"].plan(point.engine, 21000, Path("work"))
        assert plan.speculation is not None
        assert (plan.speculation.proposals, plan.speculation.is_synthetic) == (k, True)
        sweep[k] = point
    assert set(sweep) >= {5, 6, 7, 8}


def test_k_4_is_tried_so_that_its_refusal_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [point.name for point in points("h200_dspark", monkeypatch)]
    assert sorted(names) == ["k10", "k4", "k5", "k6", "k7", "k8", "no-spec"]


def test_sglang_simulates_the_curves_mean_with_the_same_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {point.name: point for point in points("h200_dspark_sglang", monkeypatch)}
    paired = by_name["k5"].engine
    plan = ENGINES["sglang"].plan(paired, 21000, Path("work"))
    assert plan.speculation is not None
    assert (plan.speculation.proposals, plan.speculation.is_synthetic) == (5, True)
    length = float(paired.env["SGLANG_SIMULATE_ACC_LEN"])
    assert length == pytest.approx(mean_length(5), abs=0.005)
    assert length == round(length)
    without = ENGINES["sglang"].plan(by_name["no-spec"].engine, 21000, Path("work"))
    assert without.speculation is None
    assert not any("specul" in word for word in without.argv)


def test_the_readme_states_the_lengths_it_derives() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([0-9.]+) \|", README, re.MULTILINE)
    assert {int(k) for k, _ in rows} == {5, 6, 7, 8, 10}
    for k, length in rows:
        assert float(length) == pytest.approx(mean_length(int(k)), abs=0.006)


@pytest.mark.parametrize(
    "name", ["h200_dspark", "h200_dspark_sglang", "h200_smollm2", "h200_smollm2_sglang", "h200x2_dspark"]
)
def test_no_start_on_these_hosts_can_use_multicast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in points(name, monkeypatch):
        plan = ENGINES[point.engine.kind].plan(point.engine, 21000, Path("work"))
        assert plan.env["NCCL_NVLS_ENABLE"] == plan.env["NVSHMEM_DISABLE_NVLS"].replace("1", "0") == "0"
        assert plan.env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert plan.env["VLLM_ALLREDUCE_USE_SYMM_MEM"] == plan.env["VLLM_USE_NCCL_SYMM_MEM"] == "0"
        assert "--disable-custom-all-reduce" in plan.argv
        assert plan.parallel_size == point.placement.gpus


def test_both_engines_get_the_same_text_and_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, sglang = points("h200_smollm2", monkeypatch), points("h200_smollm2_sglang", monkeypatch)
    assert vllm[0].workloads == sglang[0].workloads
    proposals = [
        {
            s.proposals if (s := ENGINES[p.engine.kind].plan(p.engine, 21000, Path("work")).speculation) else None
            for p in sweep
        }
        for sweep in (vllm, sglang)
    ]
    assert proposals[0] == proposals[1] == {None, 2, 4}


def test_a_cut_model_keeps_every_kind_of_layer() -> None:
    maker = load(FOLDER / "make_model.py")
    full = json.loads(maker.FULL_CONFIG.read_text(encoding="utf-8"))
    cut = maker.cut(full, 24)
    assert cut["num_hidden_layers"] == 24
    assert cut["compress_ratios"] == [0, 0, *[4, 128] * 11, 0, 0, 0]
    assert cut["dspark_target_layer_ids"] == [21, 22, 23]
    assert maker.cut(full, 43) == full
    assert {key for key in full if full[key] != cut[key]} == {
        "num_hidden_layers",
        "compress_ratios",
        "dspark_target_layer_ids",
    }
    for layers in (4, 44):
        with pytest.raises(ValueError, match="allowed are 5"):
            maker.cut(full, layers)


STUB_LOADER = """
class DummyModelLoader:
    def load_weights(self, model, model_config):
        model.calls.append("filled")
"""

TRY_PLUGIN = """
import vllm_dummy_finalize as plugin
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

calls = []

class Inner:
    def finalize_mega_moe_weights(self): calls.append("mega")
    def finalize_mhc_broadcast_weights(self): calls.append("mhc")

class Target:
    model = Inner()

class Draft:
    model = object()
    def _finalize_moe(self): calls.append("draft")

class Other:
    pass

plugin.register()
plugin.register()
for kind in (Target, Draft, Other):
    model = kind()
    model.calls = calls
    DummyModelLoader().load_weights(model, None)
print(" ".join(calls))
"""


def test_the_plugin_finishes_dummy_weights_once(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "model_executor" / "model_loader"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "dummy_loader.py").write_text(STUB_LOADER)
    env = {"PYTHONPATH": f"{tmp_path}:{FOLDER / 'dummy_finalize_plugin'}"}
    done = subprocess.run([sys.executable, "-B", "-c", TRY_PLUGIN], capture_output=True, text=True, env=env, cwd="/")
    assert done.stderr == ""
    assert done.stdout.split() == ["filled", "mega", "mhc", "filled", "draft", "filled"]


def test_the_plugin_is_found_by_its_entry_point() -> None:
    import tomllib

    project: dict[str, Any] = tomllib.loads((FOLDER / "dummy_finalize_plugin/pyproject.toml").read_text())["project"]
    module, attribute = project["entry-points"]["vllm.general_plugins"]["dummy_finalize"].split(":")
    assert callable(getattr(load(FOLDER / "dummy_finalize_plugin" / f"{module}.py"), attribute))
