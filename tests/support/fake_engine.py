"""A stand-in for the programs of vLLM, SGLang and llama.cpp, for tests.

    python tests/support/fake_engine.py vllm MODEL --port 8000 --speculative-config '{"method": "dspark", ...}'
    python tests/support/fake_engine.py sglang --model-path MODEL --port 8000 --enable-metrics
    python tests/support/fake_engine.py llamacpp -m MODEL --port 8000 --metrics

It takes the real command lines, prints the recorded start, serves the real endpoints and counts what it serves, so
the code under test cannot tell it from an engine. Four bytes of text are one token. The first token of an answer comes
alone; then every step brings one token plus those accepted. The text depends on the prompt only, so k does not change
it. The API key, where one is given, is asked for as the real servers do: vLLM on /v1, the others nearly everywhere.

FAKE_ENGINE (JSON) changes what it does; FAKE_ENGINE_FILE names a file with the same, FAKE_ENGINE wins.
"Request n" counts completions from 1 on, warm-up included. Times are seconds; the default stands in parentheses.

Speed
  seed                 changes texts and noise (0)
  tokens_per_s         decode speed of one stream without speculation (200)
  curve                {"k": decode tokens/s}: exact decode speed for these numbers of proposals ("0": none)
  proposal_cost        a step with k proposals takes 1 + proposal_cost * k times as long (0.12: best k is 6)
  batch_cost           and 1 + batch_cost * (running - 1) times as long in a batch (0)
  acceptance           share of drafts whose token i is accepted: a list, or {"k": list} (DEFAULT_ACCEPTANCE)
  remembers            drafts of a prompt that was answered before are all accepted, until the cache is reset
  no_drafts            the drafter finds nothing: no draft is made
  ttft_s               first token after this plus prefill (0.02); a prefix-cache hit saves the prefill of its tokens
  prefill_tok_s        prefill speed (50000)
  noise                relative spread of a request's decode speed, the same for request n in every launch (0)
  launch_noise         relative spread between launches of the same command line, not seeded (0)
  start_drift          a step takes this share longer with every start; counted by the lines of `record` (0)
  first_touch_s        stall, with a JIT log line, at the first prompt of each power-of-two length (0)
  hang                 {"after": n, "seconds": s}: later requests stop for s after their second chunk
Start
  load_s               the recorded start's lines are spread over this time (0.2)
  start_log            recorded log to replay instead of the dialect's own
  silent_load_s        after half of the lines nothing is printed for this time (0)
  log_mib              so much more is printed while loading (0)
  models_early         listen at once: /v1/models is 200, all else 503 while loading
  health_late_s        listen, but 503, for this time after loading (0)
  completion_500_s     completions answer 500 for this time after /health is 200 (0)
  fail                 print this recorded log (or text) instead of starting, and exit
  fail_code            with this code (1)
  fail_after_s         after the ordinary start's first lines and this time (0)
  fail_hangs_s         and its processes stay for this time afterwards (0)
  fail_starts          only the first n starts do `fail`; counted by the lines of `record` (0: all)
  fail_when            {"--flag=value" or "--flag": recorded log}: fail for these command lines
  refuse_k             list of k that get vLLM's DSpark ValueError, exit 1
  refuse_flags         more flags that this program does not know (exit 2; llama.cpp 1)
  busy_ports           ports that are in use by somebody else: the dialect's error, exit 1
  draft_warnings       the log of draft weights that were not loaded
Identity
  model_id             listed instead of the served name
  stranger             another program's server: lists stranger-7b, asks for no key, takes any model name
  version              version to tell
Streams
  faults               {kind: n}: every nth request; -n: all but every nth. Kinds: error_object and error_event (after
                       two chunks), done_only, empty, cut (no [DONE]), reset (connection broken), http_400,
                       http_429, http_500
  faults_after         the first n requests are healthy (0)
  usage                "normal", "none", "null_choices", "late" (normal)
  usage_delay_s        how late (0.5)
  continuous_usage     false: running usage is not given though it is asked for (true)
  early_role           the role-only event is sent before the prefill
  think_tokens         the first n tokens are reasoning (0), sent as
  think_field          reasoning, reasoning_content or reasoning_details (reasoning), beside a content that is
  think_content        "absent", "null" or "empty" (absent)
  tool_call            the answer is the arguments of a tool call
  tokens_per_chunk     tokens are held back until a chunk has this many (1)
  burst                this many chunks leave together (1)
  utf8_split           every event is cut inside a character, into two writes
  crlf                 lines end in CRLF
  comments             comment lines between events
Text and tokens
  text                 "prose", "code" or "mixed" (mixed)
  loop_text            the text is one word for ever
  eos_tokens           the model ends by itself after n tokens, unless ignore_eos
  short_output         it ends after n tokens whatever is asked
  prompt_tokens_factor usage.prompt_tokens is this times the real number (1.0)
Counters
  counter_reset_after  after request n all counters start again, with a new start time
  collapse_after       after request n the acceptance is that of a draft without its shared experts
  rename_metrics       {old: new} spelling on the metrics page
  drop_metrics         names whose lines are missing from the metrics page
  engines              counters spread over this many engine cores (1)
  cache_reset          "works", "refused", "empty" (200 without a body)
Process
  max_life_s           it always ends after this time (900)
  oom_after            at the end of request n: CUDA out of memory, running streams get an error object, exit 1
  die_after_s          dies this long after it is ready, by
  die_signal           this signal (SIGKILL)
  ignore_sigterm       only SIGKILL ends it
  children             file for the pids of a child, and of a grandchild in its own session; both ignore SIGTERM
  lock_cache           holds a lock in the cache folder (VLLM_CACHE_ROOT, SGLANG_CACHE_DIR, LLAMA_CACHE,
                       TRITON_CACHE_DIR); fails like a torn compile cache when another live one has it
  shm_file             leaves /dev/shm/fake_engine_PID behind
  record               file that gets one JSON line per start: argv, pid, ppid, time_s, env (names in record_env)
  record_env           environment variables to record
  record_requests      file that gets one JSON line per completion: path, head of the prompt, everything else sent
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from aiohttp import web

# Run as a program, its own folder would be first on the path; `tests` lies two above.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.support.fake import failures, logs, process  # noqa: E402
from tests.support.fake.behaviour import Behaviour, load  # noqa: E402
from tests.support.fake.flags import Launch, Refused, parse  # noqa: E402
from tests.support.fake.generation import State  # noqa: E402
from tests.support.fake.server import VERSIONS, application  # noqa: E402


def main(argv: list[str]) -> int:
    behaviour = load()
    if asked := {word.partition("=")[0] for word in argv} & {"--version", "--help"}:
        logs.say(failures.help_text(argv[0]) if "--help" in asked else behaviour.version or VERSIONS[argv[0]])
        return 0
    start = process.record_start(behaviour, argv)
    try:
        launch = parse(argv, behaviour)
    except Refused as refusal:
        logs.say(failures.failure_log(refusal.text))
        return refusal.code
    if launch.proposals in behaviour.refuse_k:
        logs.say(failures.dspark_refusal(launch.proposals, launch))
        return 1
    if log := process.refused_start(launch, behaviour):
        behaviour, start = replace(behaviour, fail=log, fail_starts=0), 1
    if behaviour.fail and (not behaviour.fail_starts or start <= behaviour.fail_starts):
        return fail(launch, behaviour, behaviour.fail)
    # Before the lock and the socket, so that the children hold neither.
    if behaviour.children:
        process.fork_children(behaviour.children)
    if behaviour.lock_cache and process.hold_cache(launch.dialect) is None:
        return fail(launch, behaviour, failures.CACHE_IN_USE)
    listener = bind(launch, behaviour)
    if listener is None:
        logs.say(failures.port_in_use(launch))
        return 1
    if behaviour.shm_file:
        process.leave_file()
    # select() waits with microseconds where epoll rounds up to a millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(serve(launch, behaviour, listener))


def fail(launch: Launch, behaviour: Behaviour, log: str) -> int:
    """End before serving, at once or after a while of ordinary loading."""
    if behaviour.fail_after_s:
        for line, _ in zip(logs.start_lines(launch, behaviour), range(12), strict=False):
            logs.say(line)
        time.sleep(behaviour.fail_after_s)
    logs.say(failures.failure_log(log))
    time.sleep(behaviour.fail_hangs_s)
    return behaviour.fail_code


def bind(launch: Launch, behaviour: Behaviour) -> socket.socket | None:
    """A bound socket, not yet listening, as vLLM takes its port before it loads. None: the port is in use."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if launch.port in behaviour.busy_ports:
            raise OSError(f"{launch.port} is in busy_ports")
        listener.bind((launch.host, launch.port))
    except OSError:
        listener.close()
        return None
    return listener


async def serve(launch: Launch, behaviour: Behaviour, listener: socket.socket) -> int:
    """Load, listen, and go on until a signal."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    state = State(launch, behaviour, os._exit)
    if behaviour.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_signal_handler(signal.SIGINT, ended.set)
    loop.call_later(behaviour.max_life_s, state.die, 0)
    runner = web.AppRunner(application(state), access_log=None, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    early = launch.dialect == "llamacpp" or behaviour.models_early
    if early and not await listen(runner, listener, launch):
        return 1
    loading = asyncio.create_task(load_model(state))
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.is_set():
        if not early and not await listen(runner, listener, launch):
            return 1
        state.ready_s = time.monotonic() + behaviour.health_late_s
        if launch.dialect == "sglang":
            logs.say(logs.stamp("sglang", logs.SGLANG_READY))
        if behaviour.die_after_s is not None:
            loop.call_later(behaviour.die_after_s, process.die_by, behaviour.die_signal)
        reporting = asyncio.create_task(report(state)) if launch.dialect == "vllm" else None
        await ended.wait()
        if reporting:
            reporting.cancel()
    loading.cancel()
    await runner.cleanup()
    logs.say(logs.goodbye(launch))
    return 0


async def listen(runner: web.AppRunner, listener: socket.socket, launch: Launch) -> bool:
    """False, with the dialect's error, when somebody took the port while this one was loading."""
    try:
        await web.SockSite(runner, listener).start()
    except OSError:
        logs.say(failures.port_in_use(launch))
        return False
    return True


async def load_model(state: State) -> None:
    """Print the start, evenly over load_s, with the silence that was asked for in its middle."""
    b, loop = state.behaviour, asyncio.get_running_loop()
    lines, begun = list(logs.start_lines(state.launch, b)), loop.time()
    for number, line in enumerate(lines):
        if number == len(lines) // 2 and b.silent_load_s:
            await asyncio.sleep(b.silent_load_s)
            begun += b.silent_load_s
        if (delay := begun + b.load_s * number / len(lines) - loop.time()) > 0:
            await asyncio.sleep(delay)
        logs.say(line)
    for number in range(round(b.log_mib * 2**20 / 128)):
        logs.say(f"padding {number} ".ljust(127, "."))


async def report(state: State, every_s: float = 10.0) -> None:
    """vLLM's sums every ten seconds, as long as something happens."""
    before = state.counters.snapshot()
    while True:
        await asyncio.sleep(every_s)
        if state.counters.steps != before.steps or state.counters.running:
            for line in logs.ten_second_lines(state.counters, before, every_s):
                logs.say(line)
        before = state.counters.snapshot()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
