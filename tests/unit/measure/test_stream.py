"""Bytes of a stream -> events -> what the answer holds, whatever way the bytes were cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.measure.stream import EventReader, Reply, error_text, one_line
from tests.support.paths import RECORDED

TEXTS = st.text(st.characters(exclude_characters="\r\n\x00", exclude_categories=("Cs",)), max_size=30)


def chunk(delta: dict | None = None, usage: dict | None = None, finish: str | None = None, **rest: Any) -> bytes:
    body = {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **rest}
    return b"data: " + json.dumps({**body, **({"usage": usage} if usage else {})}).encode() + b"\n\n"


def replied(*pieces: bytes) -> Reply:
    """Piece i arrives at second i + 1."""
    reply = Reply()
    for second, piece in enumerate(pieces, 1):
        reply.take(float(second), piece)
    reply.end()
    return reply


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    edges = [0, *sorted(b % (len(data) + 1) for b in borders), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(
    events=st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=5),
    end=st.sampled_from(["\n", "\r", "\r\n"]),
    borders=st.lists(st.integers(0, 10_000), max_size=20),
    bom=st.booleans(),
)
def test_any_cut_of_the_bytes_gives_the_same_events(
    events: list[list[str]], end: str, borders: list[int], bom: bool
) -> None:
    wire = "".join("".join(f"data: {line}{end}" for line in lines) + end for lines in events)
    data = (b"\xef\xbb\xbf" if bom else b"") + wire.encode()
    reader = EventReader()
    got = [event for piece in cut(data, borders) for event in reader.feed(piece)]
    assert got == [(b"", "\n".join(lines).encode()) for lines in events]


@given(
    borders=st.lists(st.integers(0, 100_000), max_size=40),
    name=st.sampled_from(["vllm_cpu_sse", "llama_sse_ngram", "sglang0517_cpu_ngram_sse"]),
)
def test_any_cut_of_a_recorded_stream_reads_the_same(borders: list[int], name: str) -> None:
    data = (RECORDED / f"{name}.txt").read_bytes()
    whole, pieces = replied(data), replied(*cut(data, borders))
    assert (pieces.text, pieces.completion_tokens, len(pieces.text_times_s), pieces.error) == (
        whole.text,
        whole.completion_tokens,
        len(whole.text_times_s),
        None,
    )


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=6))
def test_no_bytes_make_the_reader_raise(data: bytes, borders: list[int]) -> None:
    reply = Reply()
    for piece in cut(data, borders):
        reply.take(0.0, piece)
    reply.end()
    assert reply.error is not None


def test_lines_end_at_cr_lf_and_crlf_only() -> None:
    reader = EventReader()
    wire = "data: a\u2028b\x85c\x0bd\r\rdata: e\r\n\ndata:f\ndata\n: comment\nid: 7\ndata:  g\n\n"
    assert reader.feed(wire.encode()) == [(b"", "a\u2028b\x85c\x0bd".encode()), (b"", b"e"), (b"", b"f\n\n g")]


def test_an_unclosed_event_is_dropped_and_a_kind_does_not_leak() -> None:
    reader = EventReader()
    assert reader.feed(b"event: error\n\ndata: x\n\nevent: y\ndata: z\n\ndata: cut") == [(b"", b"x"), (b"y", b"z")]


def test_white_space_around_a_document_is_read_over() -> None:
    pieces = [
        line.replace(b"data: ", b"data: \t ", 1).replace(b"\n\n", b" \n\n") for line in (chunk({"content": "hi"}),)
    ]
    assert replied(*pieces).text == "hi"


def test_a_recorded_sglang_stream() -> None:
    reply = replied((RECORDED / "sglang0517_cpu_ngram_sse.txt").read_bytes())
    assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (41, 32, "length")
    assert reply.chunk_tokens is None
    # Running usage tells what a step brought: one token, or four accepted proposals and one more, cut at max_tokens.
    counted = replied((RECORDED / "sglang0517_cpu_ngram_sse_continuous_usage.txt").read_bytes())
    assert counted.chunk_tokens == (1, 1, 1, 1, 1, 1, 5, 5, 5, 3)
    assert counted.completion_tokens == 24


def test_a_recorded_vllm_stream() -> None:
    reply = replied((RECORDED / "vllm_cpu_sse.txt").read_bytes())
    assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (259, 151, "stop")
    assert reply.text.startswith("```python\ndef get_user(")
    assert reply.chunk_tokens is None
    assert reply.error is None


def test_running_usage_gives_the_tokens_of_each_chunk() -> None:
    reply = replied((RECORDED / "vllm_cpu_sse_continuous_usage.txt").read_bytes())
    assert reply.chunk_tokens is not None
    assert sum(reply.chunk_tokens) == reply.completion_tokens == 64
    assert reply.chunk_tokens[:3] == (1, 1, 1)
    assert max(reply.chunk_tokens) > 1


def test_tokens_without_text_stay_with_the_next_text() -> None:
    reply = replied(
        chunk({"role": "assistant", "content": ""}, {"completion_tokens": 0}),
        chunk({"content": ""}, {"completion_tokens": 1}),
        chunk({"content": "é"}, {"completion_tokens": 2}),
        chunk({"content": "x"}, {"completion_tokens": 5}, finish="stop"),
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}\n\ndata: [DONE]\n\n',
    )
    # The sixth token ended the text: its time is not known, so no chunk holds it.
    assert (reply.chunk_tokens, reply.completion_tokens) == ((2, 3), 6)
    assert reply.text_times_s == [3.0, 4.0]


@pytest.mark.parametrize("choices", ["[]", "null"])
def test_a_usage_chunk_does_not_move_the_last_token(choices: str) -> None:
    usage = f'data: {{"choices": {choices}, "usage": {{"prompt_tokens": 3, "completion_tokens": 2}}}}\n\n'.encode()
    reply = replied(chunk({"content": "a"}), chunk({"content": "b"}, finish="stop"), b"", usage + b"data: [DONE]\n\n")
    assert reply.text_times_s == [1.0, 2.0]
    assert (reply.prompt_tokens, reply.completion_tokens, reply.error) == (3, 2, None)


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "content": None},
        {"reasoning_details": [{"type": "text", "text": "hm"}], "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"thinking": "hm"},
    ],
)
def test_reasoning_is_text_and_content_comes_later(delta: dict[str, Any]) -> None:
    reply = replied(
        chunk({"role": "assistant", "content": ""}),
        chunk(delta),
        chunk({"content": "!"}, finish="stop"),
        b"data: [DONE]\n\n",
    )
    assert reply.text_times_s == [2.0, 3.0]
    assert reply.first_content_s == 3.0
    assert reply.text == "hm!"


def test_tool_calls_and_completions_carry_text() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "find", "arguments": '{"q"'}}]}
    reply = replied(
        chunk(call), chunk({"function_call": {"arguments": ": 1}"}}, finish="tool_calls"), b"data: [DONE]\n\n"
    )
    assert reply.text == 'find{"q": 1}'
    assert reply.first_content_s is None
    done = replied(b'data: {"choices": [{"text": "ab", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
    assert (done.text, done.error) == ("ab", None)


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n', "engine died"),
        (b'data: {"object": "error", "message": "no room"}\n\n', "no room"),
        (b"event: error\ndata: it broke\n\n", "it broke"),
        (b'event: error\ndata: {"detail": "it broke"}\n\n', "it broke"),
        (b"data: {torn\n\n", "unreadable event: {torn"),
        (b"data: 3\n\n", "unreadable event: 3"),
        (b"data: {} {}\n\n", "unreadable event: {} {}"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "abort"}]}\n\n', "finish_reason abort"),
    ],
)
def test_an_error_inside_the_stream_is_the_error(wire: bytes, error: str) -> None:
    reply = replied(chunk({"content": "a"}), wire)
    assert reply.error is not None
    assert error in reply.error


@pytest.mark.parametrize(
    "wire", [b"data: [DONE]\n\n", b"", chunk({"content": ""}, finish="stop") + b"data: [DONE]\n\n"]
)
def test_no_token_is_a_failure(wire: bytes) -> None:
    assert replied(wire).error == "the answer ended without a token"


def test_a_stream_without_its_end_is_a_failure() -> None:
    assert replied(chunk({"content": "a"}, finish="stop")).error == "the stream was cut before its end"


def test_tokens_that_make_no_text_up_to_the_limit_are_an_answer() -> None:
    reply = replied(chunk({"content": ""}, {"completion_tokens": 1}, finish="length"), b"data: [DONE]\n\n")
    assert (reply.error, reply.text_times_s, reply.chunk_tokens) == (None, [1.0], (1,))


def test_error_text_reads_the_usual_shapes() -> None:
    assert error_text({"error": {"message": "a"}}) == "a"
    assert error_text({"error": "b"}) == "b"
    assert error_text({"detail": [{"loc": 1}]}) == '[{"loc": 1}]'
    assert error_text({"ok": True}) is None
    assert one_line("a\n b\t c" + "x" * 600).startswith("a b cx")
    assert len(one_line("x" * 600)) == 500
