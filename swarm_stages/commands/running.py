"""Runs what a command is to do on an event loop, until it is done or a signal ends it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.process import signals

Work = Callable[[], Coroutine[Any, Any, None]]


def device_named(name: str) -> str:
    """``auto`` is the GPU if there is one. Raises ValueError if torch knows no such device."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise ValueError(f"--device is {name!r}: expected auto, cpu, cuda or cuda:1") from None


def carry_out(work: Work) -> None:
    """Raises SystemExit after a signal that ends the process, KeyboardInterrupt after Ctrl-C, and as the work does."""
    signals.unwind_on_signals()
    asyncio.run(_unless_ended(work))


async def _unless_ended(work: Work) -> None:
    """A signal that ends the process cancels the work alone: its end needs what else runs on the loop.

    Raises SystemExit after such a signal; a second one ends the process at once.
    """
    loop, working = asyncio.get_running_loop(), asyncio.ensure_future(work())
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        loop.remove_signal_handler(number)
        working.cancel()

    for number in signals.ending_signals():
        loop.add_signal_handler(number, end, number)
    try:
        await working
    except asyncio.CancelledError:
        if not ended_by:
            raise
        sys.exit(128 + ended_by[0])
