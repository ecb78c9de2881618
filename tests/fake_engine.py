"""A stand-in for the programs of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time

from aiohttp import web

from fake.behaviour import Behaviour, load
from fake.flags import Launch, Refused, parse
from fake.server import State, application
from fake.startup import SGLANG_READY, dspark_refusal, failure_log, say, stamp, start_lines


def main(argv: list[str]) -> int:
    behaviour = load()
    try:
        launch = parse(argv, behaviour)
    except Refused as refusal:
        say(failure_log(refusal.text))
        return refusal.code
    if launch.proposals in behaviour.refuse_k:
        say(dspark_refusal(launch.proposals, launch))
        return 1
    return asyncio.run(serve(launch, behaviour))


async def serve(launch: Launch, behaviour: Behaviour) -> int:
    ended = asyncio.Event()
    state = State(launch, behaviour, lambda code, text: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((launch.host, launch.port))
    runner = web.AppRunner(application(state), access_log=None, handle_signals=False)
    await runner.setup()
    begun = time.monotonic()
    lines = list(start_lines(launch, behaviour))
    early = launch.dialect == "llamacpp"
    if early:
        await web.SockSite(runner, listener).start()
    for number, line in enumerate(lines):
        delay = begun + behaviour.load_s * number / len(lines) - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        say(line)
    if not early:
        await web.SockSite(runner, listener).start()
    state.ready, state.ready_s = True, time.monotonic()
    if launch.dialect == "sglang":
        say(stamp("sglang", SGLANG_READY, begun))
    await ended.wait()
    await runner.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
