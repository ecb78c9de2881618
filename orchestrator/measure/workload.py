"""Workload -> prompts and request bodies. Prompts are seeded, begin with a nonce, and are alike in all trials."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import Workload
from orchestrator.errors import ConfigError

# Built-in texts lie beside the package, so they are found from any folder the program is run in.
BUILT_IN_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "prompts"
CODE_TEXTS = "code-review"
STORY_TEXTS = "story-chat"
INSTRUCTION_FILE = "instruction.md"
WARM_UP = -1
WARM_UP_TOKENS = 64
DEFAULT_TOKEN_PROMPT = 1024
CHARACTERS_PER_TOKEN = 4
# Ids below are special or single bytes in common vocabularies; 20,000 is inside all of them.
TOKEN_IDS = range(300, 20000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to be sent. Exactly one of text (chat or completion) and token_ids is given.

    shape names the bucket of (prompt length, output length) that must be warmed before it is measured.
    text_tokens: tokens of the text itself, without the chat template's; None when nobody could count them.
    """

    index: int
    shape: str
    max_tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    text_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedText:
    """A prompt text cut to its length, with its tokens where the server counted them."""

    text: str
    tokens: int | None


def load_texts(workload: Workload) -> list[str]:
    """The base texts of a workload, before cutting; empty for token-id prompts. Raises ConfigError.

    A file is one text, or one per line when it is .jsonl (a string, or an object with `prompt`). In a folder each file
    is one text; with an instruction.md beside them the files are one code base, and there is one text per file: the
    instruction, then all files, beginning with that one.
    """
    if workload.kind == "tokens":
        return []
    path = _prompts_path(workload)
    texts = _folder_texts(path) if path.is_dir() else _file_texts(path)
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(f"workloads.*.prompts: {path} holds no text")
    if workload.kind == "prefill" and workload.prompt_tokens is not None:
        # Only the length matters here, and nothing is generated from it: repeat the text until it is long enough.
        texts = [text * (1 + workload.prompt_tokens * 6 // len(text)) for text in texts]
    return texts


def prompt_lengths(workload: Workload) -> list[int | None]:
    """Tokens asked for, per prompt; varied by prompt_tokens_spread, the same in every repeat and trial."""
    asked = workload.prompt_tokens
    if asked is None:
        return [DEFAULT_TOKEN_PROMPT if workload.kind == "tokens" else None] * workload.num_prompts
    draw = random.Random(f"lengths {workload.seed}")
    spread = workload.prompt_tokens_spread
    return [max(1, round(asked * (1 + spread * draw.uniform(-1, 1)))) for _ in range(workload.num_prompts)]


def build_prompts(
    workload: Workload, name: str, texts: Sequence[SizedText], repeat: int, nonce_seed: str
) -> list[Prompt]:
    """The prompts of one repeat, or of warm-up (repeat WARM_UP). texts[i] is the cut text of prompt i.

    With a nonce, no two of (nonce_seed, name, repeat, index) share their first words.
    """
    prompts = []
    for index, length in enumerate(prompt_lengths(workload)):
        mark = _mark(f"{nonce_seed}/{name}/{repeat}/{index}" if workload.nonce else f"{workload.seed}/{index}")
        if workload.kind == "tokens":
            draw = random.Random(mark)
            ids = tuple(draw.choices(TOKEN_IDS, k=length or DEFAULT_TOKEN_PROMPT))
            shape = _shape(len(ids), workload.output_tokens)
            prompt = Prompt(
                index=index, shape=shape, max_tokens=workload.output_tokens, token_ids=ids, text_tokens=len(ids)
            )
        else:
            sized = texts[index]
            text = nonce(mark) + sized.text if workload.nonce else sized.text
            shape = _shape(sized.tokens or len(sized.text) // CHARACTERS_PER_TOKEN, workload.output_tokens)
            prompt = Prompt(
                index=index, shape=shape, max_tokens=workload.output_tokens, text=text, text_tokens=sized.tokens
            )
        prompts.append(prompt)
    return prompts


def nonce(mark: str) -> str:
    """The words in front of a prompt: short, natural, and new to the server's prefix cache."""
    return f"Case {mark}.\n\n"


async def cut_text(
    text: str, tokens: int | None, count: Callable[[str], Awaitable[int | None]], *, exact: bool = True
) -> SizedText:
    """`text` cut to `tokens` (None: whole) as `count` counts them; by characters where it cannot (None).

    Raises ConfigError when the text is too short. Without `exact` one count of the whole text must do.
    """
    total = await count(text)
    if tokens is None:
        return SizedText(text=text, tokens=total)
    if total is None:
        return SizedText(text=text[: tokens * CHARACTERS_PER_TOKEN], tokens=None)
    if total < tokens:
        raise ConfigError(f"workloads.*.prompt_tokens: asked for {tokens}, but the prompt text holds only {total}")
    density = len(text) / total
    cut, counted = int(tokens * density), tokens
    for _ in range(8 if exact else 0):
        counted = await count(text[:cut]) or 0
        if tokens - 2 <= counted <= tokens:
            break
        cut += int((tokens - counted) * density) or (1 if counted < tokens else -1)
    return SizedText(text=text[:cut], tokens=counted)


def request_body(model: str, prompt: Prompt, workload: Workload) -> dict[str, object]:
    """The JSON body of one request. Sampling is always sent, since the defaults of servers differ."""
    if endpoint(workload) == "/v1/chat/completions":
        asked: dict[str, object] = {"messages": [{"role": "user", "content": prompt.text}]}
    else:
        asked = {"prompt": list(prompt.token_ids) if prompt.token_ids is not None else prompt.text}
    return {"model": model, **asked, "max_tokens": prompt.max_tokens, **sent_parameters(workload)}


def sent_parameters(workload: Workload) -> dict[str, object]:
    """What every request of `workload` carries besides its prompt and length."""
    sent: dict[str, object] = {
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "seed": workload.seed,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return {**sent, "ignore_eos": True} if workload.ignore_eos else sent


def endpoint(workload: Workload) -> str:
    """The path of a workload's requests: chat, which applies the model's template; completions for raw text and ids."""
    return "/v1/chat/completions" if workload.kind in ("chat", "prefill") else "/v1/completions"


def arrival_times(workload: Workload, count: int, repeat: int) -> list[float]:
    """Open-loop start times in seconds from the start of the repeat, `count` of them; Poisson arrivals are seeded."""
    rate = workload.request_rate
    assert rate is not None
    if workload.arrival == "constant":
        return [i / rate for i in range(count)]
    draw = random.Random(f"arrivals {workload.seed} {repeat}")
    times_s = [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + draw.expovariate(rate))
    return times_s


def one_per_shape(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each shape, with a short output: what warm-up sends."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.shape, prompt)
    return list(first.values())


def _mark(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def _shape(tokens: int, output_tokens: int) -> str:
    """Bucket of a prompt length: quarters of a power of two, at least 64 wide, named by its upper edge."""
    width = max(64, 1 << max(0, tokens.bit_length() - 3))
    return f"{-(-tokens // width) * width}x{output_tokens}"


def _prompts_path(workload: Workload) -> Path:
    if workload.prompts is None:
        code = workload.kind != "chat" or workload.prompt_tokens is not None
        return BUILT_IN_FOLDER / (CODE_TEXTS if code else STORY_TEXTS)
    tried = [
        Path(workload.prompts),
        BUILT_IN_FOLDER.parent.parent / workload.prompts,
        BUILT_IN_FOLDER / workload.prompts,
    ]
    for path in tried:
        if path.exists():
            return path
    raise ConfigError(
        f"workloads.*.prompts: {workload.prompts!r} is neither a file nor a folder here, nor in {BUILT_IN_FOLDER}"
    )


def _folder_texts(folder: Path) -> list[str]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    instruction = folder / INSTRUCTION_FILE
    if instruction not in files:
        return [text for path in files for text in _file_texts(path)]
    sources = [f"### {p.relative_to(folder)}\n\n{_read(p)}\n" for p in files if p != instruction]
    head = _read(instruction).strip()
    return ["\n".join([head, "", *sources[i:], *sources[:i]]) for i in range(len(sources))]


def _file_texts(path: Path) -> list[str]:
    if path.suffix != ".jsonl":
        return [_read(path).strip()]
    texts = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        try:
            entry = json.loads(line) if line.strip() else None
        except ValueError:
            raise ConfigError(f"workloads.*.prompts: {path}, line {number}: not valid JSON") from None
        text = entry.get("prompt") if isinstance(entry, Mapping) else entry
        if isinstance(text, str):
            texts.append(text)
        elif entry is not None:
            raise ConfigError(f"workloads.*.prompts: {path}, line {number}: expected a string or an object with prompt")
    return texts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workloads.*.prompts: {path} cannot be read: {error}") from None
