"""python -m orchestrator VERB CONF [key=value ...]: runs a verb and turns how it ended into an exit code."""

from __future__ import annotations

import os
import sys

import typer

from orchestrator.cli.app import app
from orchestrator.cli.shared import print_message
from orchestrator.errors import OrchestratorError


def main() -> int:
    """Run the command line. Returns the exit code of design.md section 3."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        print_message(f"error: {getattr(error, 'format_message', error.__str__)()}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print_message("interrupted")
        return 130
    except OrchestratorError as error:
        print_message(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python flushes stdout at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
