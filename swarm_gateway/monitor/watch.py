"""Shows a swarm live, until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.monitor import Monitor, SwarmSnapshot
from swarm_gateway.monitor.status import as_json, picture, show

Paint = Callable[[SwarmSnapshot], None]


def watch(config: ClientConfig, model: str | None, interval_s: float, *, json_lines: bool = False) -> None:
    """Show the swarm until Ctrl-C: in place on a terminal, otherwise (and as JSON) one picture after the other.

    Raises:
        NoSwarm: no member answers, or no server hosts the model.
    """
    monitor = Monitor(config, model)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            snapshot = background.run(monitor.look())
            with _painter(config.swarm, interval_s, json_lines) as paint:
                while True:
                    next_s = time.monotonic() + interval_s
                    paint(snapshot)
                    snapshot = background.run(monitor.look_again(interval_s))
                    time.sleep(max(0.0, next_s - time.monotonic()))
    finally:
        background.run(monitor.close())


@contextlib.contextmanager
def _painter(swarm: str, interval_s: float, json_lines: bool) -> Iterator[Paint]:
    """Yield a function that writes a picture to stdout."""
    console = Console()
    if json_lines:
        yield lambda snapshot: print(json.dumps(as_json(swarm, snapshot)), flush=True)
    elif not sys.stdout.isatty() or console.is_dumb_terminal:
        yield lambda snapshot: _print(console, swarm, snapshot)
    else:
        footer = Text(f"every {interval_s:g} s; Ctrl-C ends it", "dim")
        last: SwarmSnapshot | None = None
        live = Live(console=console, screen=True, auto_refresh=False)

        def paint(snapshot: SwarmSnapshot) -> None:
            nonlocal last
            last = snapshot
            parts = picture(swarm, snapshot, console.width, console.height - 1)
            live.update(Group(*parts, footer), refresh=True)

        try:
            with live:
                yield paint
        finally:  # the terminal shows its earlier content again; the last picture is printed below
            if last is not None:
                show(console, swarm, last, console.height - 1)


def _print(console: Console, swarm: str, snapshot: SwarmSnapshot) -> None:
    show(console, swarm, snapshot)
    console.print()
