"""The pretended model: its tokens, its text, its prefix cache and the exact time each step takes."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fake.behaviour import COLLAPSED_ACCEPTANCE, Behaviour
from tests.support.fake.flags import Launch

BYTES_PER_TOKEN = 4
CHAT_TEMPLATE = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
GOLDEN = 0.6180339887498949

_VOCABULARY = """
river harbour engine gardener captain librarian winter market pilot orchestra valley lantern
carries measures forgets repairs follows describes balances gathers questions remembers divides
letters stones signals machines promises maps numbers shadows bridges seeds answers clocks
near_the_café beyond_the_northern_wall under_a_naïve_moon without_much_delay after_the_storm
total items buffer index cursor price weight user order record queue offset ratio width node
load store merge split render update check resolve append flatten encode rank
"""
_SUBJECTS, _VERBS, _OBJECTS, _PLACES, _NAMES, _CALLS = (line.split() for line in _VOCABULARY.strip().splitlines())


def count_tokens(prompt: str | Sequence[int]) -> int:
    """Four bytes of text are one token; token ids count themselves."""
    return -(-len(prompt.encode()) // BYTES_PER_TOKEN) if isinstance(prompt, str) else len(prompt)


def token_ids(text: str) -> list[int]:
    """Stable ids, one per four bytes."""
    data = text.encode()
    return [zlib.crc32(data[i : i + BYTES_PER_TOKEN]) % 49152 for i in range(0, len(data), BYTES_PER_TOKEN)]


def _prose(rng: random.Random) -> str:
    subject, other = rng.sample(_SUBJECTS, 2)
    verb, also = rng.sample(_VERBS, 2)
    place = rng.choice(_PLACES).replace("_", " ")
    return (
        f"The {subject} {verb} {rng.choice(_OBJECTS)} {place}, "
        f"and every {other} {also} {rng.randint(2, 97)} {rng.choice(_OBJECTS)}. "
    )


def _code(rng: random.Random) -> str:
    a, b, c = rng.sample(_NAMES, 3)
    name = f"{rng.choice(_CALLS)}_{a}"
    return (
        f"def {name}({b}, {c}={rng.randint(0, 63)}):\n    for {a} in {b}.{rng.choice(_CALLS)}({c}):\n"
        f"        {c} += {a} * {rng.randint(2, 19)}\n    return {rng.choice(_CALLS)}({c})\n\n"
    )


def write_text(seed: int, kind: str) -> Iterator[str]:
    """Endless varied text in pieces of about a token. The same seed writes the same text."""
    rng = random.Random(seed)
    while True:
        sentence = _code(rng) if kind == "code" or (kind == "mixed" and rng.random() < 0.5) else _prose(rng)
        for start in range(0, len(sentence), BYTES_PER_TOKEN):
            yield sentence[start : start + BYTES_PER_TOKEN]


def escape(text: str) -> bytes:
    """The inside of a JSON string, as UTF-8."""
    return json.dumps(text, ensure_ascii=False).encode()[1:-1]


@dataclass(slots=True)
class PrefixCache:
    """Chained hashes of whole blocks; a prompt's hits are its leading blocks that were seen before."""

    block_size: int
    capacity: int = 200_000
    blocks: dict[int, None] = field(default_factory=dict)

    def match_and_store(self, prompt: str | Sequence[int]) -> int:
        """Tokens that need no prefill. The last token is always computed, as in the real engines."""
        width = self.block_size * (BYTES_PER_TOKEN if isinstance(prompt, str) else 1)
        data: bytes | tuple[int, ...] = prompt.encode() if isinstance(prompt, str) else tuple(prompt)
        chain, hits, matching = 0, 0, True
        for start in range(0, len(data) - width + 1, width):
            chain = hash((chain, data[start : start + width]))
            matching = matching and chain in self.blocks
            hits += matching
            self.blocks[chain] = None
        if len(self.blocks) > self.capacity:
            self.blocks = dict(itertools.islice(self.blocks.items(), self.capacity // 2, None))
        full = (count_tokens(prompt) - 1) // self.block_size
        return min(hits, full) * self.block_size


@dataclass(slots=True)
class Pace:
    """Durations of one launch. With `curve` a k has exactly the decode speed that was asked for it."""

    launch: Launch
    behaviour: Behaviour
    step_s: float = field(init=False)

    def __post_init__(self) -> None:
        b, k = self.behaviour, self.launch.proposals
        mean_tokens = 1 + sum(self.launch.acceptance)
        if str(k) in b.curve:
            self.step_s = mean_tokens / b.curve[str(k)]
        else:
            self.step_s = (1 + b.proposal_cost * k) / b.tokens_per_s
        if b.launch_noise:
            self.step_s *= max(0.1, random.SystemRandom().gauss(1, b.launch_noise))
        if b.start_drift and b.record:
            starts = len(Path(b.record).read_text(encoding="utf-8").splitlines())
            self.step_s *= (1 + b.start_drift) ** (starts - 1)

    def request_factor(self, number: int) -> float:
        """Seeded, so that the same request of a second launch is as slow as in the first."""
        noise = self.behaviour.noise
        return max(0.1, random.Random(f"{self.behaviour.seed}-{number}").gauss(1, noise)) if noise else 1.0

    def prefill_s(self, uncached_tokens: int) -> float:
        return self.behaviour.ttft_s + uncached_tokens / self.behaviour.prefill_tok_s

    def steps(self, number: int, num_tokens: int, phase: float, *, known: bool = False) -> tuple[list[int], float]:
        """Accepted tokens of every step that brings `num_tokens` (`known`: all), and the duration of a whole step.

        The draws are an even (golden-ratio) sequence. What a finite number of them misses of the mean is made good
        in the duration, so that the decode speed of every request is the one that was set.
        """
        rates = (1.0,) * self.launch.proposals if known else self._rates(number)
        taken: list[int] = []
        total, whole_steps = 0, 0.0
        while total < num_tokens:
            draw = (phase + len(taken) * GOLDEN) % 1.0
            taken.append(sum(1 for rate in rates if rate > draw))
            tokens = min(1 + taken[-1], num_tokens - total)
            total += tokens
            whole_steps += tokens / (1 + taken[-1])
        due_steps = num_tokens / (1 + sum(rates))
        return taken, self.step_s * due_steps / whole_steps if taken else self.step_s

    def _rates(self, number: int) -> tuple[float, ...]:
        after, rates = self.behaviour.collapse_after, self.launch.acceptance
        if self.behaviour.no_drafts:
            return (0.0,) * len(rates)
        if after is None or number <= after:
            return rates
        return (COLLAPSED_ACCEPTANCE + (0.0,) * len(rates))[: len(rates)]
