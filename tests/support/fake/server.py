"""The HTTP side: the endpoints of the three engines, their keys, and their ways to say no."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.fake import counters as counting
from tests.support.fake.counters import KV_TOKENS
from tests.support.fake.generation import State, asked_tokens, chat_text, plan, prompt_of, run
from tests.support.fake.logs import say
from tests.support.fake.model import count_tokens, token_ids
from tests.support.fake.stream import stream
from tests.support.fake.wire import Writer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Endpoint = Callable[[State, web.Request], Awaitable[web.StreamResponse]]
VERSIONS = {"vllm": "0.26.0", "sglang": "0.5.17", "llamacpp": "b11434-unknown"}
# What may be asked without the key. SGLang and llama.cpp guard everything else, vLLM only /v1.
OPEN_PATHS = {
    "vllm": (),
    "sglang": ("/health", "/health_generate", "/metrics"),
    "llamacpp": ("/health", "/v1/health", "/v1/models"),
}


def application(state: State) -> web.Application:
    """The routes of the dialect."""
    routes: dict[str, Endpoint] = {
        "GET /health": health,
        "GET /metrics": metrics,
        "GET /v1/models": models,
        "POST /v1/chat/completions": complete,
        "POST /v1/completions": complete,
        "POST /tokenize": tokenize,
    }
    if state.launch.dialect == "vllm":
        routes["GET /version"] = version
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            routes["POST /reset_prefix_cache"] = reset_cache
    elif state.launch.dialect == "sglang":
        routes |= {f"GET {path}": model_info for path in ("/model_info", "/get_model_info")}
        routes |= {f"GET {path}": server_info for path in ("/server_info", "/get_server_info")}
        routes |= {"GET /health_generate": health, "GET /flush_cache": reset_cache, "POST /flush_cache": reset_cache}
        routes["POST /generate"] = generate
    else:
        routes |= {"GET /v1/health": health, "GET /props": props}
    app = web.Application(middlewares=[_front(state)], client_max_size=256 * 2**20)
    for route, endpoint in routes.items():
        method, path = route.split(" ")
        app.router.add_route(method, path, _bind(state, endpoint))
    return app


def _bind(state: State, endpoint: Endpoint) -> Handler:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await endpoint(state, request)

    return bound


def _front(state: State) -> Any:
    """Loading state, key check and the access log, in front of every route."""

    @web.middleware
    async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
        peer = (request.transport.get_extra_info("peername") if request.transport else None) or ("?", 0)
        response = _gate(state, request) or await handler(request)
        if state.launch.dialect != "llamacpp":
            prefix = f"(APIServer pid={os.getpid()}) " if state.launch.dialect == "vllm" else ""
            status = f"{response.status} {response.reason}"
            say(f'{prefix}INFO:     {peer[0]}:{peer[1]} - "{request.method} {request.path} HTTP/1.1" {status}')
        return response

    return front


def _gate(state: State, request: web.Request) -> web.Response | None:
    launch, path = state.launch, request.path
    guarded = path.startswith("/v1/") if launch.dialect == "vllm" else path not in OPEN_PATHS[launch.dialect]
    asks = bool(launch.api_key) and guarded and not state.behaviour.stranger
    if asks and request.headers.get("Authorization") != f"Bearer {launch.api_key}":
        if launch.dialect == "llamacpp":
            return _error(state, 401, "Invalid API Key", "authentication_error")
        return web.json_response({"error": "Unauthorized"}, status=401)
    if state.ready or (path == "/v1/models" and (state.behaviour.models_early or launch.dialect == "sglang")):
        return None
    return _error(state, 503, "Loading model", "unavailable_error")


def _error(state: State, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    if state.launch.dialect == "sglang":
        return web.json_response({"object": "error", **error}, status=status)
    if state.launch.dialect == "llamacpp":
        error = {"code": status, "message": message, "type": kind}
    return web.json_response({"error": error}, status=status)


async def health(state: State, request: web.Request) -> web.Response:
    if state.dying:
        return web.Response(status=503)
    return web.json_response({"status": "ok"}) if state.launch.dialect == "llamacpp" else web.Response()


async def version(state: State, request: web.Request) -> web.Response:
    return web.json_response({"version": state.behaviour.version or VERSIONS["vllm"]})


async def models(state: State, request: web.Request) -> web.Response:
    launch = state.launch
    card: dict[str, Any] = {"id": launch.model_id, "object": "model", "created": int(time.time())}
    card |= {"owned_by": launch.dialect, "root": launch.model, "parent": None, "max_model_len": launch.max_model_len}
    return web.json_response({"object": "list", "data": [card]})


async def metrics(state: State, request: web.Request) -> web.Response:
    if not state.launch.metrics and state.launch.dialect == "llamacpp":
        message = "This server does not support metrics endpoint. Start it with `--metrics`"
        return _error(state, 501, message, "not_supported_error")
    if not state.launch.metrics:
        return web.json_response({"detail": "Not Found"}, status=404)
    text = counting.page(state.launch, state.counters, state.behaviour)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def tokenize(state: State, request: web.Request) -> web.Response:
    body = await request.json()
    text = body.get("prompt", body.get("content"))
    tokens = token_ids(chat_text(body.get("messages", [])) if text is None else text)
    if state.launch.dialect == "llamacpp":
        return web.json_response({"tokens": tokens})
    length = {"count": len(tokens), "max_model_len": state.launch.max_model_len}
    return web.json_response(length | {"tokens": tokens, "token_strs": None})


async def props(state: State, request: web.Request) -> web.Response:
    launch = state.launch
    settings = {"n_ctx": launch.max_model_len, "params": {"speculative.types": launch.method or "none"}}
    body: dict[str, Any] = {"default_generation_settings": settings, "total_slots": launch.max_running}
    body |= {"model_alias": launch.model_id, "model_path": launch.model}
    return web.json_response(body | {"build_info": state.behaviour.version or VERSIONS["llamacpp"]})


async def model_info(state: State, request: web.Request) -> web.Response:
    path = state.launch.model
    return web.json_response({"model_path": path, "tokenizer_path": path, "is_generation": True})


async def server_info(state: State, request: web.Request) -> web.Response:
    """Every server argument, the scheduler's numbers, and a lifetime mean of the acceptance length after traffic."""
    launch, c = state.launch, state.counters
    memory = {"weight": 0.27, "kvcache": 69.24, "token_capacity": KV_TOKENS["sglang"], "graph": 0.35}
    inner: dict[str, Any] = {"last_gen_throughput": 0.0, "memory_usage": memory}
    if c.drafts:
        inner["avg_spec_accept_length"] = (c.drafts + c.accepted_tokens) / c.drafts
    told = {k.lstrip("-").replace("-", "_"): v for k, v in launch.args.items() if "key" not in k}
    arguments = {name: int(v) if isinstance(v, str) and v.isdecimal() else v for name, v in told.items()}
    body = arguments | {"model_path": launch.model, "version": state.behaviour.version or VERSIONS["sglang"]}
    return web.json_response(body | {"max_total_num_tokens": KV_TOKENS["sglang"], "internal_states": [inner]})


async def reset_cache(state: State, request: web.Request) -> web.Response:
    """SGLang refuses with 400 while requests run; vLLM says 200 whatever happened, and the truth in the body."""
    wish = state.behaviour.cache_reset
    done = wish == "works" and not state.counters.running
    if done:
        state.cache.blocks.clear()
        state.answered.clear()
    if wish == "empty":
        return web.Response()
    if state.launch.dialect == "vllm":
        return web.json_response({"success": done})
    return web.Response(text="Cache flushed.\n" if done else "Flush cache failed.\n", status=200 if done else 400)


async def complete(state: State, request: web.Request) -> web.StreamResponse:
    """/v1/chat/completions and /v1/completions, streamed or whole."""
    chat = "chat" in request.path
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        return _error(state, 400, f"1 validation error: JSON decode error: {error}", "Bad Request", "body.1")
    _record(state, request, body)
    prompt = prompt_of(body, chat=chat)
    if refusal := _refusal(state, body, round(count_tokens(prompt) * state.behaviour.prompt_tokens_factor)):
        return refusal
    job = plan(state, body, prompt)
    if job.fault and job.fault.startswith("http_"):
        return _error(state, int(job.fault[5:]), f"request {job.number} is refused on purpose", "BadRequestError")
    options, b = job.stream_options, state.behaviour
    asked_running = options.get("continuous_usage_stats") and options.get("include_usage")
    writer = Writer(
        launch=state.launch,
        behaviour=b,
        chat=chat,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=job.cached_tokens,
        continuous=bool(
            asked_running and b.continuous_usage and b.usage != "none" and state.launch.dialect != "llamacpp"
        ),
    )
    if body.get("stream"):
        return await stream(state, request, job, writer)
    if job.fault or state.dying:
        return _error(state, 500, "EngineCore encountered an issue.", "InternalServerError")
    text = b"".join([b"".join(piece.texts) async for piece in run(state, job)])
    return web.json_response(writer.whole(json.loads(b'"' + text + b'"'), job.num_tokens, job.reason, job.timings()))


def _record(state: State, request: web.Request, body: dict[str, Any]) -> None:
    """One JSON line per request, long prompts cut: what a test must know of what was sent."""
    if path := state.behaviour.record_requests:
        head = str(prompt_of(body, chat="messages" in body))[:200]
        sent = {k: v for k, v in body.items() if k not in ("messages", "prompt")}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"path": request.path, "prompt": head, **sent}) + "\n")


def _refusal(state: State, body: dict[str, Any], prompt_tokens: int) -> web.Response | None:
    launch = state.launch
    if state.dying or time.monotonic() - state.ready_s < state.behaviour.completion_500_s:
        return _error(state, 500, "EngineCore is not ready.", "InternalServerError")
    model, limit = body.get("model"), launch.max_model_len
    if launch.dialect == "vllm" and model not in (None, launch.model_id) and not state.behaviour.stranger:
        message = f"The model `{model}` does not exist. Valid aliases: {launch.model_id}."
        return _error(state, 404, message, "NotFoundError", "model")
    asked = asked_tokens(state, body, prompt_tokens)
    if launch.dialect == "vllm" and asked > limit:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        )
        return _error(state, 400, f"{message} (parameter=max_tokens, value={asked})", "BadRequestError", "max_tokens")
    if prompt_tokens + asked > limit:
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens "
            f"and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + asked} tokens."
        )
        return _error(state, 400, message, "BadRequestError", "input_tokens")
    return None


async def generate(state: State, request: web.Request) -> web.Response:
    """SGLang's own endpoint, whole answers only: its meta_info holds exact acceptance per request."""
    body = await request.json()
    params = body.get("sampling_params") or {}
    plain = {"max_tokens": params.get("max_new_tokens", 128), "ignore_eos": params.get("ignore_eos", False)}
    begun_s = time.monotonic()
    job = plan(state, plain, body.get("input_ids") or body.get("text") or "")
    text = b"".join([b"".join(piece.texts) async for piece in run(state, job)])
    meta: dict[str, Any] = {
        "id": f"{job.number:032x}",
        "finish_reason": {"type": job.reason, "length": job.num_tokens},
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.num_tokens,
        "cached_tokens": job.cached_tokens,
        "e2e_latency": time.monotonic() - begun_s,
    }
    if job.tally.drafts:
        meta |= {
            "spec_verify_ct": job.tally.drafts,
            "spec_accept_length": job.num_tokens / job.tally.drafts,
            "spec_accept_rate": job.tally.accepted_tokens / job.tally.draft_tokens,
            "spec_num_correct_drafts": job.tally.accepted_tokens,
            "spec_num_proposed_drafts": job.tally.draft_tokens,
        }
    return web.json_response({"text": json.loads(b'"' + text + b'"'), "meta_info": meta})
