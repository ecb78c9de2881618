"""The HTTP side: every endpoint of the three engines, and the streams on their exact schedule."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from fake import counters as counting
from fake.behaviour import Behaviour
from fake.counters import Counters
from fake.flags import Launch
from fake.model import CHAT_TEMPLATE, Pace, PrefixCache, count_tokens, escape, token_ids, write_text
from fake.startup import say, stamp
from fake.wire import Writer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"
VERSIONS = {"vllm": "0.26.0", "sglang": "0.5.17", "llamacpp": "b11434-unknown"}


@dataclass(slots=True)
class Request:
    """One generation: what was asked, and the plan for it."""

    number: int
    chat: bool
    body: dict[str, Any]
    prompt: str | list[int]
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    reason: str
    arrived_s: float
    fault: str | None = None

    @property
    def option(self) -> dict[str, Any]:
        return self.body.get("stream_options") or {}


@dataclass(slots=True)
class State:
    """Everything one stand-in knows while it runs."""

    launch: Launch
    behaviour: Behaviour
    exit: Callable[[int, str], None]
    counters: Counters = field(init=False)
    pace: Pace = field(init=False)
    cache: PrefixCache = field(init=False)
    slots: asyncio.Semaphore = field(init=False)
    ready: bool = False
    ready_s: float = 0.0
    number: int = 0
    touched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.counters = Counters(proposals=self.launch.proposals)
        self.pace = Pace(self.launch, self.behaviour)
        self.cache = PrefixCache(self.launch.block_size)
        self.slots = asyncio.Semaphore(self.launch.max_running)


def application(state: State) -> web.Application:
    """The routes of the dialect."""
    app = web.Application(middlewares=[_front(state)], client_max_size=256 * 2**20)
    routes: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): _bind(state, health),
        ("GET", "/metrics"): _bind(state, metrics),
        ("GET", "/v1/models"): _bind(state, models),
        ("POST", "/v1/chat/completions"): _bind(state, complete),
        ("POST", "/v1/completions"): _bind(state, complete),
        ("POST", "/tokenize"): _bind(state, tokenize),
    }
    match state.launch.dialect:
        case "vllm":
            routes[("GET", "/version")] = _bind(state, version)
            if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
                routes[("POST", "/reset_prefix_cache")] = _bind(state, reset_cache)
        case "sglang":
            for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
                routes[("GET", path)] = _bind(state, server_info)
            routes[("GET", "/health_generate")] = _bind(state, health)
            for method in ("GET", "POST"):
                routes[(method, "/flush_cache")] = _bind(state, reset_cache)
            routes[("POST", "/generate")] = _bind(state, generate)
        case _:
            routes[("GET", "/v1/health")] = _bind(state, health)
            routes[("GET", "/props")] = _bind(state, props)
    for (method, path), handler in routes.items():
        app.router.add_route(method, path, handler)
    return app


def _bind(state: State, handler: Callable[[State, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await handler(state, request)

    return bound


def _front(state: State) -> Any:
    """Key check, loading state and the access log, in front of every route."""

    @web.middleware
    async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = _gate(state, request) or await handler(request)
        if state.launch.dialect != "llamacpp":
            prefix = f"(APIServer pid={os.getpid()}) " if state.launch.dialect == "vllm" else ""
            host, port = (request.transport.get_extra_info("peername") if request.transport else None) or ("?", 0)
            say(f'{prefix}INFO:     {host}:{port} - "{request.method} {request.path} HTTP/1.1" {response.status} OK')
        return response

    return front


def _gate(state: State, request: web.Request) -> web.Response | None:
    launch, key = state.launch, state.launch.api_key
    if key and request.path.startswith("/v1/") and not state.behaviour.stranger:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return _error(state, 401, "Unauthorized", "authentication_error")
    if not state.ready and not (state.behaviour.models_early and request.path == "/v1/models"):
        if launch.dialect == "sglang" and request.path in ("/v1/models", "/model_info"):
            return None
        return _error(state, 503, "Loading model", "unavailable_error")
    return None


def _error(state: State, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    if state.launch.dialect == "sglang":
        return web.json_response({"object": "error", **error}, status=status)
    return web.json_response({"error": error}, status=status)


async def health(state: State, request: web.Request) -> web.Response:
    if state.launch.dialect == "llamacpp":
        return web.json_response({"status": "ok"})
    return web.Response()


async def version(state: State, request: web.Request) -> web.Response:
    return web.json_response({"version": state.behaviour.version or VERSIONS["vllm"]})


async def models(state: State, request: web.Request) -> web.Response:
    launch = state.launch
    owner = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}[launch.dialect]
    card = {"id": launch.model_id, "object": "model", "created": int(time.time()), "owned_by": owner}
    card |= {"root": launch.model, "parent": None, "max_model_len": launch.max_model_len}
    return web.json_response({"object": "list", "data": [card]})


async def metrics(state: State, request: web.Request) -> web.Response:
    if not state.launch.metrics:
        if state.launch.dialect == "llamacpp":
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            return _error(state, 501, message, "not_supported_error")
        return web.json_response({"detail": "Not Found"}, status=404)
    text = counting.page(state.launch, state.counters, state.behaviour)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def tokenize(state: State, request: web.Request) -> web.Response:
    body = await request.json()
    text = body.get("prompt", body.get("content"))
    if text is None:
        text = _chat_text(body.get("messages", []))
    tokens = token_ids(text)
    if state.launch.dialect == "llamacpp":
        return web.json_response({"tokens": tokens})
    return web.json_response(
        {"count": len(tokens), "max_model_len": state.launch.max_model_len, "tokens": tokens, "token_strs": None}
    )


async def props(state: State, request: web.Request) -> web.Response:
    launch = state.launch
    settings = {"n_ctx": launch.max_model_len, "params": {"speculative.types": launch.method or "none"}}
    return web.json_response(
        {
            "default_generation_settings": settings,
            "total_slots": launch.max_running,
            "model_alias": launch.model_id,
            "model_path": launch.model,
            "build_info": state.behaviour.version or VERSIONS["llamacpp"],
        }
    )


async def server_info(state: State, request: web.Request) -> web.Response:
    launch, c = state.launch, state.counters
    if "model_info" in request.path:
        return web.json_response({"model_path": launch.model, "tokenizer_path": launch.model, "is_generation": True})
    memory = {"weight": 0.27, "kvcache": 69.24, "token_capacity": 3226426, "graph": 0.35}
    inner: dict[str, Any] = {"last_gen_throughput": 0.0, "memory_usage": memory}
    if c.drafts:
        inner["avg_spec_accept_length"] = (c.drafts + c.accepted_tokens) / c.drafts
    arguments = {k.lstrip("-").replace("-", "_"): v for k, v in launch.args.items() if "key" not in k}
    body = arguments | {"model_path": launch.model, "version": state.behaviour.version or VERSIONS["sglang"]}
    return web.json_response(body | {"max_total_num_tokens": 3226426, "internal_states": [inner]})


async def reset_cache(state: State, request: web.Request) -> web.Response:
    """cache_reset: works, refused (200 and success false; SGLang 400) or empty (200 and no body)."""
    wish = state.behaviour.cache_reset
    if state.launch.dialect == "sglang":
        busy = wish == "refused" or state.counters.running
        if not busy:
            state.cache.blocks.clear()
        return web.Response(text="Cache flushed." if not busy else "Flush cache failed.", status=400 if busy else 200)
    if wish == "works":
        state.cache.blocks.clear()
    return web.Response() if wish == "empty" else web.json_response({"success": wish == "works"})


def _chat_text(messages: list[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        content = message.get("content") or ""
        parts.append(content if isinstance(content, str) else "".join(p.get("text", "") for p in content))
    return CHAT_TEMPLATE[0] + "\n".join(parts) + CHAT_TEMPLATE[1]


async def generate(state: State, request: web.Request) -> web.StreamResponse:
    """SGLang's own endpoint, without a stream."""
    body = await request.json()
    params = body.get("sampling_params") or {}
    plain = {"prompt": body.get("input_ids") or body.get("text") or "", "max_tokens": params.get("max_new_tokens", 128)}
    plain["ignore_eos"] = params.get("ignore_eos", False)
    job = _plan(state, plain, chat=False)
    drafts, accepted = state.counters.drafts, state.counters.accepted_tokens
    text = b""
    async for piece in _run(state, job):
        text += piece.text
    meta: dict[str, Any] = {
        "id": f"{job.number:032x}",
        "finish_reason": {"type": job.reason, "length": job.num_tokens},
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.num_tokens,
        "cached_tokens": job.cached_tokens,
        "e2e_latency": time.monotonic() - job.arrived_s,
    }
    if verify := state.counters.drafts - drafts:
        meta |= {
            "spec_verify_ct": verify,
            "spec_accept_length": job.num_tokens / verify,
            "spec_num_correct_drafts": state.counters.accepted_tokens - accepted,
            "spec_num_proposed_drafts": verify * state.launch.proposals,
        }
    return web.json_response({"text": json.loads(b'"' + text + b'"'), "meta_info": meta})


# --- generation ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Piece:
    """What one step gave: escaped text per token, and when it is due on the loop's clock."""

    texts: list[bytes]
    due_s: float
    total: int

    @property
    def text(self) -> bytes:
        return b"".join(self.texts)


def _plan(state: State, body: dict[str, Any], *, chat: bool) -> Request:
    b = state.behaviour
    prompt = _chat_text(body.get("messages", [])) if chat else body.get("prompt", "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    tokens = round(count_tokens(prompt) * b.prompt_tokens_factor)
    cached = state.cache.match_and_store(prompt) if state.launch.prefix_caching else 0
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("n_predict")
    asked = int(asked or (state.launch.max_model_len - tokens if chat else 16))
    natural = b.eos_tokens if b.eos_tokens and not body.get("ignore_eos") else asked
    num_tokens = min(asked, natural, b.short_output or asked)
    state.number += 1
    return Request(
        number=state.number,
        chat=chat,
        body=body,
        prompt=prompt,
        prompt_tokens=tokens,
        cached_tokens=cached,
        num_tokens=num_tokens,
        reason="length" if num_tokens == asked else "stop",
        arrived_s=time.monotonic(),
        fault=_fault(state),
    )


def _fault(state: State) -> str | None:
    number = state.number - state.behaviour.faults_after
    for kind, every in state.behaviour.faults.items():
        if number > 0 and (number % every == 0 if every > 0 else number % -every != 0):
            return kind
    return None


async def _run(state: State, job: Request) -> Any:
    """Yield each step's piece when it is due. Deadlines are absolute: a late chunk never moves the next one."""
    c, loop = state.counters, asyncio.get_running_loop()
    c.waiting += 1
    async with state.slots:
        c.waiting -= 1
        c.running += 1
        try:
            async for piece in _steps(state, job, loop):
                yield piece
        finally:
            c.running -= 1


async def _steps(state: State, job: Request, loop: asyncio.AbstractEventLoop) -> Any:
    b, c, pace = state.behaviour, state.counters, state.pace
    seed = zlib.crc32(repr(job.prompt).encode()) ^ b.seed
    words = (escape(piece) for piece in write_text(seed, b.text))
    if b.loop_text:
        words = itertools.cycle([b" the"])
    begun = loop.time()
    await _first_touch(state, job)
    due = begun + pace.prefill_s(job.prompt_tokens - job.cached_tokens) + (loop.time() - begun)
    await asyncio.sleep(due - loop.time())
    c.count_prompt(job.prompt_tokens, job.cached_tokens)
    c.generation_tokens += 1
    first_s, total = due, 1
    yield Piece([next(words)], due, 1)
    factor, accepted = pace.request_factor(job.number), pace.accepted((seed % 1000) / 1000)
    while total < job.num_tokens:
        taken = next(accepted)
        tokens = min(1 + taken, job.num_tokens - total)
        # The last step is cut to its share, so that the rate of a whole request is exact.
        share = tokens / (1 + taken)
        due += pace.step_s * factor * share * (1 + b.batch_cost * (c.running - 1))
        if (delay := due - loop.time()) > 0:
            await asyncio.sleep(delay)
        total += tokens
        c.count_step(tokens, min(taken, tokens))
        yield Piece([next(words) for _ in range(tokens)], due, total)
    prefill_s, decode_s = first_s - begun, due - first_s
    c.prefill_s += prefill_s
    c.decode_s += decode_s
    c.tokens_max = max(c.tokens_max, job.prompt_tokens + job.num_tokens)
    c.count_finish(job.reason, _observed(job, prefill_s, decode_s))


def _observed(job: Request, prefill_s: float, decode_s: float) -> dict[str, float]:
    values: dict[str, float] = {
        "request_prompt_tokens": job.prompt_tokens,
        "request_generation_tokens": job.num_tokens,
        "request_params_max_tokens": job.num_tokens,
        "time_to_first_token_seconds": prefill_s,
        "request_prefill_time_seconds": prefill_s,
        "request_decode_time_seconds": decode_s,
        "e2e_request_latency_seconds": prefill_s + decode_s,
        "request_prefill_kv_computed_tokens": job.prompt_tokens - job.cached_tokens,
    }
    if job.num_tokens > 1:
        values["request_time_per_output_token_seconds"] = decode_s / (job.num_tokens - 1)
    return {f"vllm:{name}": value for name, value in values.items()}


async def _first_touch(state: State, job: Request) -> None:
    """A kernel compiles when a prompt-length bucket (a power of two of tokens) is met for the first time."""
    bucket = max(1, job.prompt_tokens).bit_length()
    if not state.behaviour.first_touch_s or bucket in state.touched:
        return
    state.touched.add(bucket)
    kernel = "mhc_pre_big_fuse_broadcast_with_norm_tilelang"
    text = (
        f"TileLang JIT compilation during inference: {kernel}. This causes a latency spike; "
        "consider extending warmup to cover this shape/config."
    )
    say(stamp(state.launch.dialect, text, state.ready_s, level="WARNING", where="jit_monitor.py:135"))
    await asyncio.sleep(state.behaviour.first_touch_s)


async def complete(state: State, request: web.Request) -> web.StreamResponse:
    """/v1/chat/completions and /v1/completions."""
    chat = "chat" in request.path
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        return _error(state, 400, f"1 validation error: JSON decode error: {error}", "Bad Request", "body.1")
    if refusal := _refusal(state, body):
        return refusal
    job = _plan(state, body, chat=chat)
    if job.fault and job.fault.startswith("http_"):
        return _error(state, int(job.fault[5:]), f"{job.fault} on request {job.number}", "BadRequestError")
    options = job.option
    continuous = bool(options.get("continuous_usage_stats") and options.get("include_usage"))
    writer = Writer(
        launch=state.launch,
        behaviour=state.behaviour,
        chat=chat,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=job.cached_tokens,
        continuous=continuous and state.behaviour.continuous_usage and state.launch.dialect != "llamacpp",
    )
    if body.get("stream"):
        return await _stream(state, request, job, writer)
    text = b""
    async for piece in _run(state, job):
        text += piece.text
    return web.json_response(writer.whole(json.loads(b'"' + text + b'"'), job.num_tokens, job.reason, {}))


def _refusal(state: State, body: dict[str, Any]) -> web.Response | None:
    launch = state.launch
    if time.monotonic() - state.ready_s < state.behaviour.completion_500_s:
        return _error(state, 500, "EngineCore is not ready.", "InternalServerError")
    model = body.get("model")
    if launch.dialect == "vllm" and model not in (None, launch.model_id) and not state.behaviour.stranger:
        message = f"The model `{model}` does not exist. Valid aliases: {launch.model_id}."
        return _error(state, 404, message, "NotFoundError", "model")
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if launch.dialect == "vllm" and asked > launch.max_model_len:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={launch.max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={asked})"
        )
        return _error(state, 400, message, "BadRequestError", "max_tokens")
    return None


async def _stream(state: State, request: web.Request, job: Request, writer: Writer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Server": "uvicorn"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    role = writer.role()
    async for piece in _run(state, job):
        data = writer.text(piece.text, piece.total)
        await response.write((role + data) if role else data)
        role = None
    await response.write(writer.finish(job.reason, "", job.num_tokens))
    if job.option.get("include_usage"):
        await response.write(writer.usage(job.num_tokens, {}))
    await response.write(DONE)
    await response.write_eof()
    return response
