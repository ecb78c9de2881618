"""Bytes of one streamed answer -> its text, tokens and times. Pure: server-sent events and OpenAI chunks, no HTTP.

The client passes the times in: it stamps every piece of bytes on arrival, before parsing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

REASONING_NAMES = ("reasoning", "reasoning_content", "reasoning_details", "thinking")
FAILED_FINISHES = ("abort", "error")
_BOM = b"\xef\xbb\xbf"
_decode = json.JSONDecoder().raw_decode


class EventReader:
    """Server-sent events from pieces of bytes cut anywhere, parsed as the HTML standard defines.

    Lines end at CR, LF or CRLF and nowhere else, so a piece may end inside a character, a line or a CRLF.
    An event that no blank line has closed when the stream ends is dropped, as the standard requires.
    """

    __slots__ = ("_after_cr", "_at_start", "_data", "_kind", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._kind = b""
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """The (event type, data) pairs that this piece completes."""
        if self._after_cr:
            if not piece:
                return []
            self._after_cr = False
            if piece[0] == 10:
                piece = piece[1:]
        if b"\r" in piece:
            # A CR ends its line at once; should an LF open the next piece, it belongs to that CR.
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._tail + piece if self._tail else piece).split(b"\n")
        self._tail = lines.pop()
        if len(lines) == 2 and not (lines[1] or self._data or self._kind) and lines[0].startswith(b"data: "):
            # The usual piece: one whole event of one line. Nothing below would do anything else with it.
            self._at_start = False
            return [(b"", lines[0][6:])]
        events: list[tuple[bytes, bytes]] = []
        for line in lines:
            if self._at_start:
                self._at_start = False
                line = line.removeprefix(_BOM)
            if line:
                self._field(line)
            elif self._data:
                events.append((self._kind, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
                self._data, self._kind = [], b""
            else:
                self._kind = b""
        return events

    def _field(self, line: bytes) -> None:
        if line.startswith(b"data: "):
            self._data.append(line[6:])
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._kind = value


class Reply:
    """One streamed answer, gathered piece by piece.

    text_times_s, text_tokens: arrival of each chunk that carries text, and the running completion_tokens at it (None
    where the server does not report it). A chunk with only a role, only usage or empty text is in neither.
    """

    __slots__ = (
        "_events",
        "_first_token_s",
        "_pieces",
        "cached_tokens",
        "completion_tokens",
        "done",
        "error",
        "finish_reason",
        "first_content_s",
        "prompt_tokens",
        "text_times_s",
        "text_tokens",
    )

    def __init__(self) -> None:
        self._events = EventReader()
        self._pieces: list[str] = []
        self._first_token_s: float | None = None
        self.text_times_s: list[float] = []
        self.text_tokens: list[int | None] = []
        self.first_content_s: float | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def chunk_tokens(self) -> tuple[int, ...] | None:
        """Tokens in each text chunk, those without text before it included; None unless every chunk reported it."""
        running = [tokens for tokens in self.text_tokens if tokens is not None]
        if not running or len(running) < len(self.text_tokens):
            return None
        return tuple(after - before for before, after in zip([0, *running], running, strict=False))

    def take(self, arrived_s: float, piece: bytes) -> None:
        """Read the bytes that arrived at `arrived_s`."""
        for kind, data in self._events.feed(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            text = data.decode("utf-8", "replace")
            try:
                chunk = _json(text)
            except ValueError:
                chunk = None
            if kind == b"error" or not isinstance(chunk, dict):
                self.fail(one_line(error_text(chunk) or f"unreadable event: {text}"))
            else:
                self._chunk(arrived_s, chunk)

    def fail(self, error: str) -> None:
        """Keep the first error."""
        if self.error is None:
            self.error = error

    def end(self) -> None:
        """The stream has ended. No token, or no [DONE] at its end, becomes the error."""
        if self.error is not None:
            return
        if not self.text_times_s and self._first_token_s is not None and self.finish_reason == "length":
            # Tokens came up to the limit but none made text (half a character, a special token).
            self.text_times_s.append(self._first_token_s)
            self.text_tokens.append(self.completion_tokens)
        if not self.text_times_s:
            self.fail("the answer ended without a token")
        elif not self.done:
            self.fail("the stream was cut before its end")

    def _chunk(self, arrived_s: float, chunk: Mapping[str, Any]) -> None:
        if chunk.get("error") or chunk.get("object") == "error":
            self.fail(one_line(error_text(chunk) or str(chunk)))
            return
        usage = chunk.get("usage")
        running = self._usage(usage) if isinstance(usage, dict) else None
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        content, other = _texts(choice)
        if content or other:
            self.text_times_s.append(arrived_s)
            self.text_tokens.append(running)
            self._pieces.append(other + content)
            if content and self.first_content_s is None:
                self.first_content_s = arrived_s
        finish = choice.get("finish_reason")
        if finish:
            self.finish_reason = str(finish)
            if finish in FAILED_FINISHES:
                self.fail(f"the engine ended the request: finish_reason {finish}")
        if (running or finish) and self._first_token_s is None:
            self._first_token_s = arrived_s

    def _usage(self, usage: Mapping[str, Any]) -> int | None:
        running = usage.get("completion_tokens")
        if isinstance(running, int):
            self.completion_tokens = running
        if isinstance(usage.get("prompt_tokens"), int):
            self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.cached_tokens = details["cached_tokens"]
        return running if isinstance(running, int) else None


def _texts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """(content, reasoning and tool calls) of one choice, of chat or of completions."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return (text if isinstance(text, str) else ""), ""
    content = delta.get("content")
    if len(delta) == 1 and isinstance(content, str):
        return content, ""
    other = [_flat(delta.get(name)) for name in REASONING_NAMES]
    # Servers that moved from one spelling to the other send both with the same text.
    if other[0] and other[0] == other[1]:
        other[1] = ""
    other += [_flat(call.get("function")) for call in delta.get("tool_calls") or () if isinstance(call, dict)]
    other += [_flat(delta.get("function_call")), _flat(delta.get("refusal"))]
    return _flat(content), "".join(other)


def _flat(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_flat(part) for part in value)
    if isinstance(value, dict):
        return "".join(_flat(value.get(name)) for name in ("text", "summary", "name", "arguments"))
    return ""


def _json(text: str) -> Any:
    """json.loads, a third faster for a document without white space around it."""
    try:
        document, end = _decode(text)
    except ValueError:
        return json.loads(text)
    return document if end == len(text) else json.loads(text)


def error_text(body: object) -> str | None:
    """The message inside an engine's error document, whichever of the usual shapes it has."""
    if isinstance(body, str):
        return body
    if not isinstance(body, dict):
        return None
    for name in ("error", "message", "detail"):
        if body.get(name):
            return error_text(body[name]) or json.dumps(body[name], ensure_ascii=False)
    return None


def one_line(text: str, limit: int = 500) -> str:
    """`text` on one line, cut to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
