"""The machines and the arms of the simulations: what both versions of the program are asked."""

from __future__ import annotations

from orchestrator.config import TrialSpec
from orchestrator.trial import TrialResult

KEY = "engine.args.speculative-config.num_speculative_tokens"
WORKLOAD, METRIC = "code", "decode_tok_s"
ARMS = range(1, 8)

# repeat_sd, launch_sd: standard deviations of the logarithm of a rate. autocorrelation: of one repeat with the next,
# over the whole campaign. drift: change of the logarithm over the campaign.
MACHINES: dict[str, dict[str, float]] = {
    "independent 3%": {"repeat_sd": 0.03},
    "launches 2%": {"launch_sd": 0.02, "repeat_sd": 0.005},
    "autocorrelated 0.7": {"repeat_sd": 0.03, "autocorrelation": 0.7},
    "drift 5%": {"repeat_sd": 0.005, "drift": 0.05},
}


def proposals(result: TrialResult | TrialSpec) -> int:
    """The arm of a result: its k."""
    spec = result if isinstance(result, TrialSpec) else result.spec
    return int(spec.params[KEY])
