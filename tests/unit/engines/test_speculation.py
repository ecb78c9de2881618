"""What each engine module knows about speculation before the start: method, family, proposals, simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES, LaunchPlan
from orchestrator.engines.base import FAMILIES
from orchestrator.errors import ConfigError
from orchestrator.measure.checks_speculation import LOWEST_ACCEPTANCE

TWO_DRAFTED = {"method": "dspark", "num_speculative_tokens": 2}


def plan(kind: str, args: dict[str, Any], env: dict[str, str] | None = None) -> LaunchPlan:
    spec = EngineSpec(kind=kind, args=args, env=env or {}, model="org/model")
    return ENGINES[kind].plan(spec, 8101, Path("/tmp/trial"))


@pytest.mark.parametrize(
    ("kind", "args", "proposals"),
    [
        ("vllm", {}, None),
        ("vllm", {"speculative-config": None}, None),
        ("vllm", {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}'}, 4),
        ("vllm", {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 3}, 3),
        ("vllm", {"spec-method": "ngram", "spec-tokens": 2}, 2),
        ("vllm", {"speculative-config": {"method": "ngram", "num_speculative_tokens": 0}}, None),
        ("sglang", {}, None),
        ("sglang", {"speculative-num-draft-tokens": 6}, None),
        ("sglang", {"speculative-algorithm": "EAGLE", "speculative-num-draft-tokens": 6}, 5),
        ("sglang", {"speculative-algorithm": "EAGLE", "speculative-num-steps": 3}, 3),
        ("sglang", {"speculative-algorithm": "DSPARK", "speculative-dspark-block-size": 5}, 5),
        ("sglang", {"speculative-algorithm": "NGRAM"}, 11),
        ("llamacpp", {}, None),
        ("llamacpp", {"spec-type": "none"}, None),
        ("llamacpp", {"spec-type": "draft-dspark", "spec-draft-n-max": 5}, 5),
        ("llamacpp", {"-md": "draft.gguf"}, 3),
        ("llamacpp", {"spec-type": ["ngram-simple", "draft-mtp"]}, 48),
    ],
)
def test_proposals_are_comparable_between_engines(kind: str, args: dict[str, Any], proposals: int | None) -> None:
    found = plan(kind, args).speculation
    assert (found.proposals if found else None) == proposals


@pytest.mark.parametrize(
    ("kind", "args", "method", "forgets"),
    [
        ("vllm", {}, None, False),
        ("vllm", {"speculative-config": {"method": "dspark", "num_speculative_tokens": 6}}, "dspark", False),
        ("vllm", {"spec-method": "ngram", "spec-tokens": 2}, "ngram", False),
        ("sglang", {}, None, False),
        ("sglang", {"speculative-algorithm": "none"}, None, False),
        ("sglang", {"speculative-algorithm": "DSPARK"}, "DSPARK", False),
        ("sglang", {"speculative-algorithm": "ngram"}, "NGRAM", True),
        ("llamacpp", {"spec-type": "none"}, None, False),
        ("llamacpp", {"-md": "draft.gguf"}, "draft-simple", False),
        ("llamacpp", {"spec-type": ["ngram-simple", "draft-mtp"]}, "ngram-simple,draft-mtp", False),
    ],
)
def test_the_method_is_reported(kind: str, args: dict[str, Any], method: str | None, forgets: bool) -> None:
    made = plan(kind, args).speculation
    assert (made is None) == (method is None)
    if made is not None:
        assert (made.method, made.forget_path is not None) == (method, forgets)


@pytest.mark.parametrize(
    ("kind", "args", "family"),
    [
        ("vllm", {"spec-method": "dspark"}, "dspark"),
        ("vllm", {"spec-method": "mtp"}, "mtp"),
        ("vllm", {"spec-method": "deepseek_mtp"}, "mtp"),
        ("vllm", {"spec-method": "draft_model"}, "draft_model"),
        ("vllm", {"spec-method": "suffix"}, "suffix"),
        ("vllm", {"spec-method": "unheard_of"}, None),
        ("vllm", {"spec-model": "org/draft"}, None),
        ("sglang", {"speculative-algorithm": "DSPARK"}, "dspark"),
        ("sglang", {"speculative-algorithm": "NEXTN"}, "mtp"),
        ("sglang", {"speculative-algorithm": "STANDALONE"}, "draft_model"),
        ("sglang", {"speculative-algorithm": "EAGLE3"}, "eagle3"),
        ("sglang", {"speculative-algorithm": "NGRAM"}, "ngram"),
        ("llamacpp", {"spec-type": "draft-dspark"}, "dspark"),
        ("llamacpp", {"spec-type": "draft-mtp"}, "mtp"),
        ("llamacpp", {"spec-type": "draft-simple"}, "draft_model"),
        ("llamacpp", {"spec-type": "ngram-map-k"}, "ngram"),
        ("llamacpp", {"spec-type": "ngram-simple,draft-mtp"}, None),
    ],
)
def test_a_method_has_one_family_over_engines(kind: str, args: dict[str, Any], family: str | None) -> None:
    made = plan(kind, args).speculation
    assert made is not None
    assert made.family == family


def test_families_with_a_lowest_acceptance_are_those_of_the_engines() -> None:
    assert set(LOWEST_ACCEPTANCE) < FAMILIES


def test_speculation_without_a_number_is_reported() -> None:
    assert plan("vllm", {"speculative-config": {"method": "mtp"}}).warnings
    assert plan("sglang", {"speculative-algorithm": "DSPARK"}).warnings
    assert not plan("vllm", {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}).warnings


@pytest.mark.parametrize(
    ("kind", "args", "env", "is_synthetic"),
    [
        ("vllm", {"speculative-config": {**TWO_DRAFTED, "rejection_sample_method": "synthetic"}}, {}, True),
        ("vllm", {"speculative-config": TWO_DRAFTED}, {}, False),
        ("sglang", {"speculative-algorithm": "EAGLE"}, {"SGLANG_SIMULATE_ACC_LEN": "3.5"}, True),
        ("sglang", {"speculative-algorithm": "EAGLE"}, {"SGLANG_SIMULATE_ACC_LEN": "-1"}, False),
        ("llamacpp", {"spec-type": "ngram-mod", "spec-synth-len": 3.5}, {}, True),
        ("llamacpp", {"spec-type": "ngram-mod", "spec-synth-rates": [0.9, 0.5]}, {}, True),
        ("llamacpp", {"spec-type": "ngram-mod"}, {}, False),
    ],
)
def test_synthetic_acceptance_is_seen(kind: str, args: dict[str, Any], env: dict[str, str], is_synthetic: bool) -> None:
    found = plan(kind, args, env=env).speculation
    assert found is not None
    assert found.is_synthetic is is_synthetic


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_speculative_config_that_is_no_mapping_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative-config"):
        plan("vllm", {"speculative-config": text})
