"""The runner of a command: it runs the work on an event loop until the work is done, or a signal ends it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.process import signals

Work = Callable[[], Coroutine[Any, Any, None]]


def device_named(name: str) -> str:
    """Return torch's name of a device; ``auto`` is the GPU if there is one. Raises ValueError for an unknown name."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise ValueError(f"--device is {name!r}: expected auto, cpu, cuda or cuda:1") from None


def carry_out(work: Work) -> None:
    """Run the work. Raises SystemExit after an ending signal, KeyboardInterrupt after Ctrl-C, and as the work does."""
    signals.unwind_on_signals()
    asyncio.run(_unless_ended(work))


async def _unless_ended(work: Work) -> None:
    """Run the work; a signal that ends the process cancels it alone, since its clean-up needs the loop's other tasks.

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
