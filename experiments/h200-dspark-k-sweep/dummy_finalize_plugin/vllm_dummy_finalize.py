"""A vLLM plugin that lets 0.26.0 start DeepSeek-V4 with `--load-format dummy`.

DeepSeek-V4 derives some tensors from its weights (the summed mHC mixing matrix of the first layer, mega-MoE layouts)
in the model's own `load_weights`. The dummy loader fills the parameters and never calls it, so the first forward pass
stops at `assert self.hc_attn_fn_broadcast is not None`. The plugin makes the dummy loader finish what it began, before
the weights are brought into their kernels' format, as the real loader does.

vLLM calls `register` in each of its processes, possibly more than once.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("vllm.dummy_finalize")


def register() -> None:
    """Wrap vLLM's dummy loader, once per process."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_weights = DummyModelLoader.load_weights
    if getattr(load_weights, "finalizes", False):
        return

    @functools.wraps(load_weights)
    def load_and_finalize(self: Any, model: Any, model_config: Any) -> None:
        load_weights(self, model, model_config)
        finalize(model)

    load_and_finalize.finalizes = True  # type: ignore[attr-defined]
    DummyModelLoader.load_weights = load_and_finalize


def finalize(model: Any) -> list[str]:
    """Call what the model's own `load_weights` would call at its end; returns the names called.

    The target model keeps the calls on its inner model, DSpark's draft model on itself; other models have neither.
    """
    called = []
    for owner in (getattr(model, "model", None), model):
        for name in ("finalize_mega_moe_weights", "finalize_mhc_broadcast_weights", "_finalize_moe"):
            method = getattr(owner, name, None)
            if callable(method):
                method()
                called.append(name)
    if called:
        logger.info("Dummy weights of %s finalized: %s", type(model).__name__, ", ".join(called))
    return called
