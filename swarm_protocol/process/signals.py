"""Signal handling of a command's process: while it starts, while it works, and when its terminal is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # its terminal is gone; None on Windows
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when its parent ends
INTERRUPTED = 130  # the exit code in a shell of a command ended by Ctrl-C: 128 + SIGINT


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once and silently, for the time while modules are imported.

    An exception in the middle of an import would print a traceback, or be swallowed.
    """
    for number in _heard(signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))


def unwind_on_signals() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit, so that resources are closed.

    A second SIGTERM ends the process at once. A second SIGHUP does not, because a closing terminal may send several.
    """
    for number in _heard(signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    for number in ending_signals():
        signal.signal(number, _unwind)


def ending_signals() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that end the process; under ``nohup``, SIGHUP is not among them."""
    return _heard(signal.SIGTERM, HANGUP)


def all_ending_signals() -> list[signal.Signals]:
    """Return the signals that end the process; in the background of a shell, Ctrl-C is not among them."""
    return [*_heard(signal.SIGINT), *ending_signals()]


def _heard(*numbers: signal.Signals | None) -> list[signal.Signals]:
    """Return the signals that exist on this system, without those that this process ignores."""
    return [number for number in numbers if number is not None and signal.getsignal(number) is not signal.SIG_IGN]


def exit_in_words(code: int) -> str:
    """Return how a process has ended. ``code``: its exit code, which is negative after a signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"


def call_on_signal(number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
    """Call ``callback`` with the signal, in the running event loop, each time that the signal comes."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, callback, number)
    except NotImplementedError:  # on Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback, number))


def stop_calling(number: signal.Signals, before: signal._HANDLER) -> None:
    """Undo ``call_on_signal``; ``before``: what the signal did then, as ``signal.getsignal`` returns it."""
    with contextlib.suppress(NotImplementedError):  # on Windows
        asyncio.get_running_loop().remove_signal_handler(number)
    signal.signal(number, signal.SIG_DFL if before is None else before)


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
            sys.exit(128 + came[0])  # the exit code that a shell gives a command that a signal has ended


def _unwind(number: int, _frame: FrameType | None) -> None:
    _expect_another(number)
    sys.exit(128 + number)


def _expect_another(number: int) -> None:
    """Let a second SIGTERM end the process at once, and a second SIGHUP do nothing."""
    if number == HANGUP:
        signal.signal(number, signal.SIG_IGN)
        leave_terminal()  # the cleanup may print
    else:
        signal.signal(number, signal.SIG_DFL)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process the signal when its parent ends, even if killed. Only Linux can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def leave_terminal() -> None:
    """Redirect output for a closed terminal to /dev/null, so that writes do not raise OSError."""
    import termios  # where there is a SIGHUP, there are terminals

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except (termios.error, OSError) as error:
            if error.args[0] == errno.EIO:  # a closed terminal; a file or a pipe gives ENOTTY
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, descriptor)
                    os.close(nowhere)
