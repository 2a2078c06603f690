"""The front of runs in stages for ``swarm server --train`` and ``swarm train``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swarm_protocol.process.signals import ending_signals
from swarm_protocol.size import parse_size
from swarm_protocol.span import Span
from swarm_training.commands.flags import address_of, joining_as
from swarm_training.commands.staged import StagesBackend
from swarm_training.contract.backend import Joining
from swarm_training.core.callbacks import Command
from swarm_training.reports.reporter import OpenReporter, parse_report
from swarm_training.reports.stepping import StepReports, open_reports
from swarm_training.runfile.reading import read_run_file
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import require_stages, stage_source
from swarm_training.stages.commands.exporting import export_run
from swarm_training.stages.commands.looking import look
from swarm_training.stages.commands.running import carry_out, device_named
from swarm_training.stages.commands.training import train_run
from swarm_training.stages.placement.spans import spans_of_stages, stage_with
from swarm_training.stages.routing.run_stages import stage_run

say = partial(print, flush=True)


def serve_stage(args: argparse.Namespace) -> Command:
    """Return what ``swarm server`` with ``--train`` was asked for. Raises ValueError if a flag is wrong."""
    from swarm_training.stages.commands.inference import after_last_step  # late, as ``serve`` below

    file = read_run_file(args.train)
    require_stages(file)
    if args.blocks is not None and args.initial_blocks is not None:
        raise ValueError("--blocks and --initial-blocks: expected one of them")
    address = address_of(args, "announce_address")
    who = joining_as("TRAINER", file, args.initial_peers, args.membership, args.identity, locks=True)
    who = replace(who, address=address)
    stays, blocks = args.initial_blocks is None, args.blocks or args.initial_blocks
    reports = [parse_report(text) for text in args.report]
    afterwards = None if args.then_serve is None else after_last_step(file, args.then_serve, None, args.quant)
    options = {"stays": stays, "afterwards": afterwards}
    return _until_stopped(_hold_blocks(file, who, blocks, args.device, args.memory, reports, **options))


def _hold_blocks(
    file: RunFile,
    who: Joining,
    blocks: str | None,
    device: str,
    memory: str | None,
    reports: Sequence[OpenReporter],
    **options: Any,
) -> Command:
    """Return the command that holds the stage with these blocks; None: the stage that limits the run. See ``hold``."""
    require_stages(file)
    index = None
    if blocks is not None:
        span, spans = Span.parse(blocks), spans_of_stages(stage_source(file).config, file.stages.count)
        index = stage_with(span, spans)
    return hold(file, who, index, device, memory, reports, **options)


def hold(
    file: RunFile,
    who: Joining,
    index: int | None,
    device: str,
    memory: str | None,
    reports: Sequence[OpenReporter] = (),
    **options: Any,
) -> Command:
    """Return the command that holds a stage. ``reports``: where the numbers of each step go. ``index``, ``options``:
    see ``serve``."""
    from swarm_training.stages.commands.serving import serve  # late: it imports servers, which watching a run does not

    options["memory_bytes"] = None if memory is None else parse_size(memory)
    named = device_named(device)

    def run() -> None:
        with _opened(reports, file) as opened:
            carry_out(lambda: serve(file, who, index, say, named, reports=opened, **options))

    return run


@contextmanager
def _opened(reports: Sequence[OpenReporter], file: RunFile) -> Iterator[StepReports | None]:
    """Open the places for the numbers of each step. Raises ValueError if one of them cannot be opened."""
    with closing(open_reports(reports, file.run.name)) as opened:
        yield opened if reports else None


def _until_stopped(hold: Command) -> Command:
    """Return the command without an error at its end after a signal: ``swarm server`` ends so without ``--train``."""

    def run() -> None:
        try:
            hold()
        except KeyboardInterrupt:
            pass
        except SystemExit as end:
            if end.code not in {128 + number for number in ending_signals()}:
                raise

    return run


def train(file: RunFile, who: Joining, reports: Sequence[OpenReporter] = (), end: int | None = None) -> Command:
    """Return the command that takes data through the stages; ``end``: see ``train_run``."""
    require_stages(file)

    def run() -> None:
        with _opened(reports, file) as opened:
            carry_out(lambda: train_run(file, who, end, say, opened))

    return run


def export(file: RunFile, who: Joining, directory: Path, averaged: bool, best: bool) -> Command:
    """Return the command that writes what was trained; see ``export_run``."""
    require_stages(file)

    def run() -> None:
        carry_out(lambda: export_run(file, who, directory, say, averaged=averaged, best=best))

    return run


def _stage_runs(file: RunFile, who: Joining) -> list[Joining]:
    size = require_stages(file)
    names = [stage_run(file.run.name, stage) for stage in range(file.stages.count)]
    return [replace(who, run=name, target_batch_size=size) for name in names]


STAGES = StagesBackend(_hold_blocks, train, export, look, _stage_runs)
