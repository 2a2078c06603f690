"""The runner of a command: it runs the work on an event loop until the work is done, or a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.process import signals

Work = Callable[[], Coroutine[Any, Any, None]]


def device_named(name: str) -> str:
    """Return torch's name of a device; ``auto`` is a GPU if one can compute in float64, as sums of losses are. Raise
    ValueError if the name is unknown, or the device cannot be used here or not in float64."""
    import torch

    from swarm_models.gpu.devices import best_device, named_device

    return str(named_device(best_device(torch.float64) if name == "auto" else name, torch.float64))


def carry_out(work: Work) -> None:
    """Run the work. Raises SystemExit after an ending signal, KeyboardInterrupt after Ctrl-C, and as the work does."""
    signals.unwind_on_signals()
    asyncio.run(_unless_ended(work))


async def _unless_ended(work: Work) -> None:
    """Run the work; a signal that ends the process cancels it alone, since its clean-up needs the loop's other tasks.

    Raises SystemExit after such a signal; a second one ends the process at once.
    """
    working = asyncio.ensure_future(work())
    ended_by: list[int] = []

    def end(number: signal.Signals) -> None:
        ended_by.append(number)
        signal.signal(number, signal.SIG_DFL)
        working.cancel()

    for number in signals.ending_signals():
        signals.call_on_signal(number, end)
    try:
        await working
    except asyncio.CancelledError:
        if not ended_by:
            raise
        sys.exit(128 + ended_by[0])
