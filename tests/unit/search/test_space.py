"""Points: names, duplicates, the space and its conditions."""

from __future__ import annotations

import pytest

from orchestrator import search
from orchestrator.errors import ConfigError
from orchestrator.search.space import Dimension, draw, plan, point_name
from tests.support.builders import CONFIG, WORKLOAD, K, make_experiment

METHOD = f"{CONFIG}.method"


def test_variants_and_grid_add_up_in_the_written_order() -> None:
    specs, skipped = search.points(make_experiment(variants={"no-spec": {CONFIG: None}}, grid={K: [4, 5, 10]}))
    assert [spec.name for spec in specs] == ["no-spec", "k=4", "k=5", "k=10"]
    assert skipped == []
    assert specs[0].engine.args["speculative-config"] is None
    assert specs[3].engine.args["speculative-config"] == {"method": "ngram", "num_speculative_tokens": 10}
    assert specs[3].params == {K: 10}


def test_a_search_left_out_is_one_point() -> None:
    [only], skipped = search.points(make_experiment())
    assert only.name == "base"
    assert only.params == {}
    assert skipped == []


def test_a_point_written_twice_is_skipped_and_says_so() -> None:
    twice = make_experiment(variants={"six": {K: 6}}, grid={K: [5, 6, 6]})
    specs, skipped = search.points(twice)
    assert [spec.name for spec in specs] == ["six", "k=5"]
    assert skipped == [("k=6", "the same configuration as six")] * 2
    assert len(specs) + len(skipped) == 1 + 3


def test_names_are_unique_even_where_the_short_forms_are_not() -> None:
    values = ["/data/a/model", "/data/b/model"]
    specs, _ = search.points(make_experiment(grid={"engine.model": values}))
    assert [spec.name for spec in specs] == ["model=model", "model=model~2"]
    assert [spec.engine.model for spec in specs] == values


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({K: 6}, "k=6"),
        ({K: 6, "engine.args.max-num-seqs": 4}, "k=6,max-num-seqs=4"),
        ({"engine.args.a.size": 1, "engine.args.b.size": 2}, "a.size=1,b.size=2"),
        ({"engine.args.enforce-eager": True, CONFIG: None}, "enforce-eager=true,speculative-config=null"),
        ({CONFIG: {"method": "ngram", "num_speculative_tokens": 3}}, "speculative-config=method=ngram+k=3"),
        ({"engine.args.cuda-graph-bs": [1, 2]}, "cuda-graph-bs=1+2"),
        ({"engine.args.text": "a b/c:d"}, "text=c_d"),
    ],
)
def test_names_can_be_read(params: dict[str, object], name: str) -> None:
    assert point_name(params) == name


def test_two_grid_keys_make_their_product() -> None:
    specs, _ = search.points(make_experiment(grid={K: [2, 4], "engine.args.max-model-len": [1024, 2048]}))
    assert [spec.name for spec in specs] == [
        "k=2,max-model-len=1024",
        "k=2,max-model-len=2048",
        "k=4,max-model-len=1024",
        "k=4,max-model-len=2048",
    ]


def test_random_draws_are_different_seeded_and_accounted_for() -> None:
    some = make_experiment(sampler="random", space={K: {"low": 1, "high": 8}}, num_samples=5, seed=7)
    names = [spec.name for spec in search.points(some)[0]]
    assert len(set(names)) == 5
    assert names == [spec.name for spec in search.points(some)[0]]
    assert set(names) <= {f"k={k}" for k in range(1, 9)}
    more = plan(make_experiment(sampler="random", grid={K: [2, 4]}, num_samples=5))
    assert sorted(spec.name for spec in more.points) == ["k=2", "k=4"]
    assert [(skipped.name, "no more than 2" in skipped.reason) for skipped in more.skipped] == [("3 samples", True)]


def test_a_conditional_key_is_drawn_only_where_its_condition_holds() -> None:
    space = {
        CONFIG: [None, {"method": "ngram"}],
        K: {"low": 1, "high": 8, "when": {METHOD: "ngram"}},
    }
    asked: list[str] = []

    def suggest(dimension: Dimension, first: int) -> object:
        asked.append(dimension.key)
        return dimension.choices[first] if dimension.choices else 5

    both = make_experiment(sampler="tpe", space=space)
    assert draw(both, lambda dimension: suggest(dimension, 0)) == {CONFIG: None}
    assert asked == [CONFIG]
    assert draw(both, lambda dimension: suggest(dimension, 1)) == {CONFIG: {"method": "ngram"}, K: 5}
    drawn, _ = search.points(make_experiment(sampler="random", space=space, num_samples=9))
    assert len(drawn) == 9
    assert sum(spec.engine.args["speculative-config"] is None for spec in drawn) == 1


def test_steps_and_logarithmic_ranges_keep_their_bounds() -> None:
    space = {
        "engine.args.max-num-batched-tokens": {"low": 1024, "high": 8192, "step": 1024},
        "engine.args.gpu-memory-utilization": {"low": 0.5, "high": 0.9, "log": True},
        "engine.args.max-num-seqs": {"low": 1, "high": 256, "log": True},
    }
    for spec in search.points(make_experiment(sampler="random", space=space, num_samples=20))[0]:
        assert spec.engine.args["max-num-batched-tokens"] in range(1024, 8193, 1024)
        assert 0.5 <= spec.engine.args["gpu-memory-utilization"] <= 0.9
        assert spec.engine.args["max-num-seqs"] in range(1, 257)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"grid": {K: []}}, f"search.grid.{K}: the list is empty"),
        ({"space": {K: [1, 2]}}, "needs sampler random or tpe"),
        ({"sampler": "random", "space": {K: {"lo": 1, "high": 2}}}, f"search.space.{K}"),
        ({"sampler": "random", "space": {K: {"low": 3, "high": 1}}}, "low <= high"),
        ({"sampler": "random", "space": {K: {"low": "a", "high": 1}}}, "must be numbers"),
        ({"sampler": "random", "space": {K: []}}, "empty"),
        ({"grid": {"tracking.uri": ["a"]}}, "cannot differ between trials"),
        ({"grid": {f"workloads.{WORKLOAD}.promt_tokens": [1]}}, "promt_tokens"),
    ],
)
def test_a_wrong_search_names_its_key(section: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("|", r"\|")):
        search.points(make_experiment(**section))
