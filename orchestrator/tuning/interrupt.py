"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends the work in order, the second at once.

No engine outlives us either way: its keeper ends it when the process of its trial disappears.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = "\nended at once; the engines are killed, and runs left open are closed by the next campaign\n"


class Interrupts:
    """signal: the name of the first signal that arrived, None before one did."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._deferred = False

    def _handle(self, number: int, _frame: object) -> None:
        if self.signal is not None:
            # Wait for nothing: what hangs may be why the person sends a second one. Ray's processes end with this one.
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), AT_ONCE.encode())
            os._exit(EXIT_CODE)
        self.signal = signal.Signals(number).name
        if not self._deferred:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """While entered, a first signal only sets `signal`: for a loop that reads it, and for work that must finish."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before


@contextlib.contextmanager
def handle_signals() -> Iterator[Interrupts]:
    """Handle the three signals alike while entered: the first raises KeyboardInterrupt, unless it is deferred.

    SIGHUP stays ignored under nohup: such a campaign is meant to outlive its terminal.
    """
    interrupts = Interrupts()
    previous = {
        number: signal.signal(number, interrupts._handle) for number in SIGNALS if not _is_ignored_by_nohup(number)
    }
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_ignored_by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
