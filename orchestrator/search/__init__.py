"""Finding the best: the points to try, and which result wins. Pure: it knows neither Ray nor MLflow.

space: which points. objective: values and constraints. comparison: trials against each other. arms: the launches of
each point. decision: what they prove. order: which launch when. pruning: what need not be measured. selection: which
result wins; wording: in words.
"""

from orchestrator.search.arms import pool_points
from orchestrator.search.comparison import pareto, with_campaign_metrics
from orchestrator.search.objective import score, value
from orchestrator.search.order import conclude, count_starts, next_pass, pass_order
from orchestrator.search.pruning import clearly_worse, hopeless
from orchestrator.search.selection import Selection, check, select, value_for_sampler
from orchestrator.search.space import Dimension, Plan, Skipped, check_engines, draw, plan, points

__all__ = [
    "Dimension",
    "Plan",
    "Selection",
    "Skipped",
    "check",
    "check_engines",
    "clearly_worse",
    "conclude",
    "count_starts",
    "draw",
    "hopeless",
    "next_pass",
    "pareto",
    "pass_order",
    "plan",
    "points",
    "pool_points",
    "score",
    "select",
    "value",
    "value_for_sampler",
    "with_campaign_metrics",
]
