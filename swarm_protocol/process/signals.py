"""How the process of a command answers signals: while it starts, while it works, and when its terminal is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # exit code of a shell's command that Ctrl-C has ended: 128 + SIGINT


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once and without a word: for as long as modules are imported.

    An exception in the midst of an import would end in a traceback, or be swallowed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def unwind_on_signals() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit: what is open is closed.

    A second SIGTERM ends the process at once. A second SIGHUP does not: a terminal that closes may send several.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ending_signals():
        signal.signal(number, _unwind)


def ending_signals() -> list[signal.Signals]:
    """Those besides Ctrl-C that end a process: SIGHUP is not among them under ``nohup``."""
    asked = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


def _unwind(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
        leave_terminal()
    else:
        signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def leave_terminal() -> None:
    """What is still written to a terminal that was closed goes nowhere instead of raising OSError."""
    import termios

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except (termios.error, OSError) as error:
            if error.args[0] == errno.EIO:  # ENOTTY: a file or a pipe
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, descriptor)
                    os.close(nowhere)
