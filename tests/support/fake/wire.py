"""How each engine writes an answer: the bytes of every event, in the shape of the recorded streams."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.flags import Launch

CUT = "\x00TEXT\x00"


@dataclass(slots=True)
class Writer:
    """Encodes the events of one request. Everything but text and usage is encoded once, when the request begins."""

    launch: Launch
    behaviour: Behaviour
    chat: bool
    prompt_tokens: int
    cached_tokens: int
    continuous: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    created: int = field(default_factory=lambda: int(time.time()))
    templates: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)

    def role(self) -> bytes | None:
        """The first event of a chat stream, which carries no text."""
        if not self.chat:
            return None
        content = None if self.launch.dialect == "llamacpp" else ""
        delta: dict[str, Any] = {"role": "assistant", "content": content}
        if self.launch.dialect == "sglang":
            delta |= {"reasoning_content": None, "tool_calls": None}
        return self._event(self._chunk(delta, None, first=True), 0)

    def text(self, text: bytes, tokens_so_far: int, field_name: str = "content") -> bytes:
        """One event with `text`, which is already JSON-escaped. Here every microsecond counts."""
        if field_name not in self.templates:
            body = self._chunk(self._delta(field_name), None)
            if self.launch.dialect == "sglang" and not self.continuous:
                body["usage"] = None
            head, _, tail = json.dumps(body, separators=(",", ":")).partition(json.dumps(CUT)[1:-1])
            self.templates[field_name] = (b"data: " + head.encode(), tail.encode())
        head_bytes, tail_bytes = self.templates[field_name]
        if self.continuous:
            tail_bytes = b'%b,"usage":%b}' % (tail_bytes[:-1], self._running_usage(tokens_so_far))
        return b"%b%b%b\n\n" % (head_bytes, text, tail_bytes)

    def finish(self, reason: str, text: str, tokens: int) -> bytes:
        """The event that carries finish_reason; vLLM puts the last text into it, the others send it empty."""
        delta = {} if self.launch.dialect == "llamacpp" else self._delta("content", text)
        return self._event(self._chunk(delta, reason), tokens)

    def usage(self, tokens: int, timings: dict[str, float]) -> bytes:
        body = self._chunk({}, None)
        body["choices"] = None if self.behaviour.usage == "null_choices" else []
        body["usage"] = self.usage_object(tokens)
        if self.launch.dialect == "llamacpp":
            body["timings"] = timings
        if self.launch.dialect == "vllm":
            body["system_fingerprint"] = "vllm-0.26.0-tp1-0a1b2c3d"
        return self._encode(body)

    def usage_object(self, tokens: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "completion_tokens": tokens,
        }
        details = {"cached_tokens": self.cached_tokens}
        if self.launch.dialect == "llamacpp" or "--enable-prompt-tokens-details" in self.launch.args:
            usage["prompt_tokens_details"] = details
        if self.launch.dialect == "sglang":
            report = "--enable-cache-report" in self.launch.args
            usage |= {"prompt_tokens_details": details if report else None, "reasoning_tokens": 0}
        return usage

    def error(self, *, as_event: bool) -> bytes:
        """What a stream carries when the engine dies under a running request."""
        error = {"message": "EngineCore encountered an issue.", "type": "Internal Server Error", "code": 500}
        head = b"event: error\ndata: " if as_event else b"data: "
        return head + json.dumps({"error": error}, separators=(",", ":")).encode() + b"\n\n"

    def whole(self, text: str, tokens: int, reason: str, timings: dict[str, float]) -> dict[str, Any]:
        """The answer to a request that did not ask for a stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        body: dict[str, Any] = {
            "id": self._id(),
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.launch.model_id,
            "choices": [choice],
        }
        if self.behaviour.usage != "none":
            body["usage"] = self.usage_object(tokens)
        if self.launch.dialect == "llamacpp":
            body["timings"] = timings
        return body

    def _id(self) -> str:
        return self.id if self.launch.dialect == "sglang" else f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"

    def _delta(self, field_name: str, text: str = CUT) -> dict[str, Any]:
        if field_name == "tool_calls":
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        value: Any = [{"type": "reasoning.text", "text": text}] if field_name == "reasoning_details" else text
        delta: dict[str, Any] = {field_name: value}
        if field_name != "content" and self.behaviour.think_content != "absent":
            delta["content"] = None if self.behaviour.think_content == "null" else ""
        if self.launch.dialect == "sglang" and self.chat:
            delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None} | delta
        return delta

    def _chunk(self, delta: dict[str, Any], reason: str | None, *, first: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        if self.launch.dialect != "llamacpp":
            choice["logprobs"] = None
        choice["finish_reason"] = reason
        if self.launch.dialect == "sglang":
            choice["matched_stop"] = None
        if self.launch.dialect == "vllm":
            choice |= {} if first else {"token_ids": None}
            choice |= {"stop_reason": None} if reason or not self.chat else {}
        body: dict[str, Any] = {
            "id": self._id(),
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.launch.model_id,
            "choices": [choice],
        }
        if self.launch.dialect == "llamacpp":
            body["system_fingerprint"] = "b11434-unknown"
        if first and self.launch.dialect == "vllm":
            body |= {"prompt_token_ids": None, "prompt_text": None}
        return body

    def _event(self, body: dict[str, Any], tokens: int) -> bytes:
        if self.continuous:
            body["usage"] = json.loads(self._running_usage(tokens))
        elif self.launch.dialect == "sglang":
            body["usage"] = None
        return self._encode(body)

    def _running_usage(self, tokens: int) -> bytes:
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            self.prompt_tokens,
            self.prompt_tokens + tokens,
            tokens,
        )

    @staticmethod
    def _encode(body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
