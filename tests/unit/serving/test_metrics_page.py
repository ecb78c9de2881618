"""The metrics pages of several engines as one."""

from __future__ import annotations

from orchestrator.serving.metrics_page import merge_pages


def test_metrics_of_several_engines_become_one_page() -> None:
    page = '# HELP a_total Words.\n# TYPE a_total counter\na_total 1.0\n# TYPE b gauge\nb{x="1"} 2\nb{} 3\n'
    text = merge_pages([("r1", page), ("r2", page)])
    assert text.splitlines() == [
        "# HELP a_total Words.",
        "# TYPE a_total counter",
        'a_total{replica="r1"} 1.0',
        'a_total{replica="r2"} 1.0',
        "# TYPE b gauge",
        'b{replica="r1",x="1"} 2',
        'b{replica="r1"} 3',
        'b{replica="r2",x="1"} 2',
        'b{replica="r2"} 3',
    ]
