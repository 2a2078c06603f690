"""Signal handling of a command's process: while it starts, while it works, and when its terminal is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # the exit code in a shell of a command ended by Ctrl-C: 128 + SIGINT


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once and silently, for the time while modules are imported.

    An exception in the middle of an import would print a traceback, or be swallowed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a shell's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def unwind_on_signals() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit, so that resources are closed.

    A second SIGTERM ends the process at once. A second SIGHUP does not, because a closing terminal may send several.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ending_signals():
        signal.signal(number, _unwind)


def ending_signals() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that end the process; under ``nohup``, SIGHUP is not among them."""
    asked = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def held(on_signal: Callable[[], None]) -> Iterator[None]:
    """Hold SIGTERM and SIGHUP back while the main thread runs an event loop; raise SystemExit at the end if one came.

    An exception inside a turn of the loop can lose a callback that is ready: its task then never ends, and neither does
    the loop. ``on_signal`` is called in the main thread at any moment, and must make the loop end by itself.
    """
    came: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        _expect_another(number)
        on_signal()

    before = {number: signal.signal(number, hold) for number in ending_signals()}
    try:
        yield
    finally:
        for number in before.keys() - came:
            signal.signal(number, before[number])
        if came:
            sys.exit(128 + came[0])


def _unwind(number: int, _frame: FrameType | None) -> None:
    _expect_another(number)
    sys.exit(128 + number)


def _expect_another(number: int) -> None:
    """Let a second SIGTERM end the process at once, and a second SIGHUP do nothing."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
        leave_terminal()
    else:
        signal.signal(number, signal.SIG_DFL)


def leave_terminal() -> None:
    """Redirect output for a closed terminal to /dev/null, so that writes do not raise OSError."""
    import termios

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except (termios.error, OSError) as error:
            if error.args[0] == errno.EIO:  # a closed terminal; a file or a pipe gives ENOTTY
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, descriptor)
                    os.close(nowhere)
