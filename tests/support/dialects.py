"""The dialects of the stand-in, and the flags with which each of them drafts and shows its counters."""

from __future__ import annotations

from tests.support.fake.talk import DSPARK_6

DIALECTS = ("vllm", "sglang", "llamacpp")

SPEC_FLAGS = {
    "vllm": DSPARK_6,
    "sglang": ("--enable-metrics", "--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "6"),
    "llamacpp": ("--metrics", "--spec-type", "draft-dspark", "--spec-draft-n-max", "6"),
}

METRICS_FLAGS = {"vllm": (), "sglang": ("--enable-metrics",), "llamacpp": ("--metrics",)}
