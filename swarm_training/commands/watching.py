"""The command ``swarm train watch``, which shows a run as a live page until Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from swarm_protocol.wire.printable import printable
from swarm_training.contract.views import BanView, PeerView, RunView, StagePeerView, StageView, UserView

_UNITS = ("B", "KB", "MB", "GB", "TB")
_SHOWN_PEERS = 8  # last characters of a peer id
_NAME_CHARS = 24
_SHOWN_EVENTS = 5


def watch(
    look: Callable[[], RunView],
    interval_s: float,
    *,
    json_lines: bool = False,
    in_terminal: bool = True,
    also: Sequence[Callable[[RunView], object]] = (),
) -> None:
    """Show the run: in place if stdout is a terminal, else (and as JSON) one picture after the other. Without
    ``in_terminal``, print no pictures. Each of ``also`` is called with each view too."""
    with contextlib.suppress(KeyboardInterrupt), _painter(json_lines, in_terminal) as paint:
        while True:
            next_s = time.monotonic() + interval_s
            view = look()
            for take in (*also, paint):
                take(view)
            time.sleep(max(0.0, next_s - time.monotonic()))


def as_json(view: RunView) -> dict[str, Any]:
    """Return a view as values for JSON, where a number that is not finite is null: JSON has no infinity."""
    # The speeds that peers claim are finite, but their sum may not be, nor a time that is divided by it.
    finite: dict[str, Any] = _finite({**dataclasses.asdict(view), "samples_per_s": view.samples_per_s})
    return finite


def _finite(value: Any) -> Any:
    """Return a value for JSON with None in place of each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_finite, value))
    return None if isinstance(value, float) and not isfinite(value) else value


def picture(view: RunView, now: float) -> list[RenderableType]:
    """Return the parts of one picture. ``now``: Unix time in seconds, to show how long bans still last."""
    speed, what = view.samples_per_s, "micro-batches" if view.stages else "samples"
    soon = "nobody computes" if view.next_step_s is None else f"next step in {_duration(view.next_step_s)}"
    share = view.samples / view.target_batch_size
    rate = "" if view.learning_rate is None else f"   learning rate {view.learning_rate:.3g}"
    details = _details(view)
    parts: list[RenderableType] = [
        Text(title_line(view), "bold"),
        Text(f"{view.samples} of {view.target_batch_size} {what} ({share:.0%}), {speed:.3g} {what}/s: {soon}"),
        Text(f"last step: {_bytes(view.bytes_sent)} sent, {_bytes(view.bytes_received)} received by all{rate}", "dim"),
        *([Text(details, "dim")] if details else []),
        *([_stages_table(view), _stage_peers_table(view.stages)] if view.stages else [_peers_table(view.peers)]),
    ]
    if view.held_out is not None:
        parts.insert(1, Text(held_out_line(view)))
    if view.users:
        parts.append(_users_table(view.users))
    if view.bans:
        parts.append(_bans_table(view.bans, now))
    parts += [Text(f"{_duration(now - event.at)} ago: {event.text}", "dim") for event in view.events[-_SHOWN_EVENTS:]]
    return parts


def title_line(view: RunView) -> str:
    """Return the name of the run, its step, and the loss of that step if it is known."""
    loss = "" if view.loss is None else f"   loss {view.loss:.4f}" if isfinite(view.loss) else "   loss not finite"
    back = f"   rollbacks {view.rollbacks}" if view.rollbacks else ""
    return f"run {printable(view.run)}   step {view.step}{back}{loss}"


def _details(view: RunView) -> str:
    computing = "" if view.computing is None else f"about {view.computing:.0%} of the time spent computing   "
    kept = "" if view.checkpoint is None else f"newest checkpoint: step {view.checkpoint}"
    return f"{computing}{kept}".strip()


def held_out_line(view: RunView) -> str:
    """Return the newest and the lowest loss on held-out data of a view that has one."""
    assert view.held_out is not None
    newest, best = (
        "" if each is None else f"{'not finite' if each.loss is None else f'{each.loss:.4f}'} at step {each.step}"
        for each in (view.held_out, view.best_held_out)
    )
    end = ": the run has ended, as it falls no more" if view.has_ended else ""
    return f"loss on held-out data {newest}{f', lowest {best}' if best else ''}{end}"


def _peers_table(peers: tuple[PeerView, ...]) -> Table:
    table = Table("peer", "user")
    for title in ("samples/s", "samples"):
        table.add_column(title, justify="right")
    for peer in sorted(peers, key=lambda peer: -peer.samples_per_s):
        name = Text(printable(peer.name, _NAME_CHARS))
        table.add_row(_end(peer.peer_id), name, f"{peer.samples_per_s:.3g}", str(peer.samples))
    return table


def _stages_table(view: RunView) -> Table:
    table = _stages_columns("stage", "peers", "step", "micro-batches", "holds", "per second")
    for stage in view.stages:
        done = f"{stage.micro_batches} of {view.target_batch_size}"
        table.add_row(str(stage.stage), str(len(stage.peers)), *_standing(stage, done))
    return table


def _stage_peers_table(stages: tuple[StageView, ...]) -> Table:
    table = _stages_columns("stage", "peer", "step", "micro-batches", "holds", "per second", "moves to")
    for stage in stages:
        for peer in stage.peers:
            to = "" if peer.next_stage is None else str(peer.next_stage)
            table.add_row(str(stage.stage), _end(peer.peer_id), *_standing(peer, str(peer.micro_batches)), to)
    return table


def _stages_columns(*titles: str) -> Table:
    return Table(*(Column(title, justify="left" if title == "peer" else "right") for title in titles))


def _standing(of: StageView | StagePeerView, done: str) -> tuple[str, str, str, str]:
    back = f" ({of.rollbacks} rollbacks)" if of.rollbacks else ""
    return f"{of.step}{back}", done, "yes" if of.holds else "", f"{of.micro_batches_per_s:.3g}"


def _users_table(users: tuple[UserView, ...]) -> Table:
    table = Table("most samples by", Column("samples", justify="right"), Column("share", justify="right"))
    for user in users:
        table.add_row(Text(printable(user.name, _NAME_CHARS)), str(user.samples), f"{user.share:.1%}")
    return table


def _bans_table(bans: tuple[BanView, ...], now: float) -> Table:
    table = Table("banned", "for", "reason")
    for ban in bans:
        table.add_row(_end(ban.peer_id), _duration(ban.until - now), Text(printable(ban.reason, 80)))
    return table


def _end(peer_id: str) -> Text:
    return Text(f"…{printable(peer_id[-_SHOWN_PEERS:])}")


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (2 * 86_400, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


@contextlib.contextmanager
def _painter(json_lines: bool, in_terminal: bool) -> Iterator[Callable[[RunView], None]]:
    console = Console()
    if json_lines:
        yield lambda view: print(json.dumps(as_json(view)), flush=True)
    elif not in_terminal:
        yield lambda view: None
    elif not sys.stdout.isatty() or console.is_dumb_terminal:
        yield lambda view: console.print(Group(*picture(view, time.time())), "")
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda view: live.update(Group(*picture(view, time.time())), refresh=True)
