"""What is a secret, and how it is written down: the one definition for variables, arguments and URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Stands for a secret whose value is written nowhere: it is taken from the environment where an engine starts.
MASK = "****"
# A variable is a secret when its name holds one of these anywhere.
_VARIABLE = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD", re.IGNORECASE)
# The names of arguments speak of tokens and keys that are none (max-num-batched-tokens, long-prefill-token-threshold).
_ARGUMENT = re.compile(r"api[-_]?key|(?:hf|auth|access)[-_]token|secret|password", re.IGNORECASE)
_URL_LOGIN = re.compile(r"//[^/@\s]*@")


def is_secret_variable(name: str) -> bool:
    """Whether the value of an environment variable must not be written down."""
    return _VARIABLE.search(name) is not None


def is_secret_argument(name: str) -> bool:
    """Whether the value of an engine's argument must not be written down."""
    return _ARGUMENT.search(name) is not None


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """An environment that may be written down."""
    return {name: MASK if is_secret_variable(name) else value for name, value in env.items()}


def mask_urls(text: str) -> str:
    """`text` without the user and password of the URLs in it."""
    return _URL_LOGIN.sub(f"//{MASK}@", text)
