"""Finding the best: the points to try, and which result wins. Pure: it knows neither Ray nor MLflow.

space: which points. objective: values and constraints. comparison: trials against each other. pruning: what need not
be measured. selection: which result wins.
"""

from orchestrator.search.comparison import baseline, pareto, with_campaign_metrics
from orchestrator.search.objective import score, value
from orchestrator.search.pruning import clearly_worse, hopeless, in_order
from orchestrator.search.selection import Selection, check, confirmations, select, value_for_sampler
from orchestrator.search.space import Dimension, Plan, Skipped, check_engines, draw, plan, points

__all__ = [
    "Dimension",
    "Plan",
    "Selection",
    "Skipped",
    "baseline",
    "check",
    "check_engines",
    "clearly_worse",
    "confirmations",
    "draw",
    "hopeless",
    "in_order",
    "pareto",
    "plan",
    "points",
    "score",
    "select",
    "value",
    "value_for_sampler",
    "with_campaign_metrics",
]
