"""Command line for training: ``swarm train init``, ``join``, ``export``, ``watch``, ``ledger``, ``moderate``.

A command is a function that checks its arguments, as far as this machine can, and returns the function that does the
work.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path

from swarm_protocol.access.member_flags import CONFIG_RULES
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import Parsers, apply_config, leaves
from swarm_protocol.process.invocation import run_command
from swarm_protocol.size import parse_size
from swarm_training.commands.flags import (
    add_address_flags,
    add_export_flags,
    add_joining_flags,
    add_report_flag,
    add_run_command,
    address_of,
    joining,
    parse_batch_size,
    parse_part,
    require_initial_peers,
)
from swarm_training.commands.staged import (
    STAGE,
    TRAINER,
    Stages,
    StagesBackend,
    export_staged,
    join_staged,
    require_unstaged,
)
from swarm_training.contract.backend import Backend, Joining, PeerAddress
from swarm_training.contract.views import RunView
from swarm_training.core.callbacks import Command
from swarm_training.reports.observing import RunObserver
from swarm_training.reports.reporter import parse_report
from swarm_training.reports.stepping import open_reports
from swarm_training.runfile.reading import read_run_file
from swarm_training.runfile.settings import RunFile

_PROG = "swarm train"
WEB_ADDRESS = "127.0.0.1:8090"
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 3600.0
_MAX_HOURS = 24 * 3660.0
_MAX_STEP = 1 << 53
_ROLLBACK_LASTS_S = 3600.0  # by then the order has been carried out, or cannot be


def make_parser(backend: Backend | None = None, stages: Stages | None = None) -> argparse.ArgumentParser:
    """Return the parser. ``backend`` reaches a run in place of the network; ``stages`` returns what reaches a run in
    stages."""
    parser = argparse.ArgumentParser(prog=_PROG, description="Train one model together with others.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    command = partial(add_run_command, commands)

    init = command("init", _init, "write a commented run file, or check the one that is there")
    init.add_argument("run_file", type=Path, metavar="RUN.toml")

    join = command("join", partial(_join, backend, stages), "train on this machine, until Ctrl-C")
    add_joining_flags(join)
    join.add_argument("--as", dest="role", choices=(STAGE, TRAINER), help="role of this machine in a run in stages")
    join.add_argument(
        "--blocks", metavar="START:END", help="blocks of the stage to hold; else where the run is slowest"
    )
    join.add_argument("--memory", metavar="SIZE", help="memory that the process may take, such as 4GiB")
    join.add_argument("--batch-size", metavar="N|auto", help="samples to compute at once; else as in the run file")
    join.add_argument("--part", metavar="K/N", help="part of the data to read, if peers divide them")
    join.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, xpu or mps")
    add_address_flags(join)
    join.add_argument("--client-mode", action="store_true", help="nobody can call this machine; it calls others")
    add_report_flag(join)

    export = command("export", partial(_export, stages), "write a run in stages as a checkpoint for transformers")
    add_joining_flags(export)
    add_export_flags(export)

    watch = command("watch", partial(_watch, backend, stages), "show the run live, until Ctrl-C")
    add_joining_flags(watch)
    watch.add_argument("--json", action="store_true", help="print a line of JSON each time")
    watch.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="time between two updates")
    watch.add_argument(
        "--web",
        nargs="?",
        const=WEB_ADDRESS,
        metavar="HOST:PORT",
        help=f"show it as a page for browsers instead, at {WEB_ADDRESS} if no address is given",
    )
    add_report_flag(watch)

    summed = command("ledger", partial(_ledger, backend, stages), "show how much each user has contributed")
    add_joining_flags(summed)
    summed.add_argument("--file", type=Path, metavar="LEDGER", help="sum this file instead of asking peers")
    summed.add_argument("--json", action="store_true", help="print JSON")

    _add_moderate(commands, backend)
    return parser


def parse_args(
    argv: list[str],
    backend: Backend | None = None,
    all_parsers: Callable[[], Parsers] | None = None,
    stages: Stages | None = None,
) -> argparse.Namespace:
    """Parse the arguments. ``all_parsers``: the parsers of all commands, see ``apply_config``.

    Raises ValueError if the configuration file is wrong.
    """
    parser = make_parser(backend, stages)
    apply_config(dict(leaves(parser, ("train",))), argv, CONFIG_RULES, all_parsers)
    return parser.parse_args(argv)


def _add_moderate(commands: argparse._SubParsersAction[argparse.ArgumentParser], backend: Backend | None) -> None:
    text = "order a ban or a rollback; needs the membership of a moderator"
    actions = commands.add_parser("moderate", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    rollback = add_run_command(
        actions, "rollback", partial(_rollback, backend), "go back to a checkpoint, all together"
    )
    add_joining_flags(rollback)
    rollback.add_argument(
        "--to-step", type=int, required=True, metavar="N", help="the newest checkpoint up to this step is taken"
    )
    ban = add_run_command(actions, "ban", partial(_ban, backend), "ban a peer")
    add_joining_flags(ban)
    ban.add_argument("peer_id", metavar="PEER_ID")
    ban.add_argument("--hours", type=float, default=24.0, metavar="N", help="duration of the ban")
    ban.add_argument("--reason", default="", help="reason, shown to all")


def _init(args: argparse.Namespace) -> Command:
    from swarm_training.runfile.example import example

    path = args.run_file
    if path.exists():
        file = read_run_file(path)
        from swarm_training.commands.checking import not_here

        try:
            unchecked = not_here(file)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        summary = f"{path} is right: run {file.run.name} with {file.run.target_batch_size} samples a step"
        return lambda: print(summary, *unchecked, sep="\n")

    def run() -> None:
        try:
            with path.open("x") as new:
                new.write(example(str(path)))
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        print(f"wrote {path}: change it, check it by `{_PROG} init {path}`, then `{_PROG} join {path}`")

    return run


def _join(backend: Backend | None, stages: Stages | None, args: argparse.Namespace) -> Command:
    file = read_run_file(args.run_file)
    address = address_of(args)
    who = partial(joining, args, file, "TRAINER", locks=True)
    if file.stages.count:
        return join_staged(partial(_required, stages), args, file, dataclasses.replace(who(), address=address))
    require_unstaged(args)
    if args.client_mode and not args.initial_peers:
        raise ValueError("--client-mode needs --initial-peers: a run is founded by a peer that others can call")
    if args.client_mode and address != PeerAddress():
        raise ValueError("--client-mode is for a machine that nobody can call: expected no address or port with it")
    if args.batch_size is not None:
        size = parse_batch_size(args.batch_size)
        batch = dataclasses.replace(file.batch, size=size, max_size=max(size, file.batch.max_size))
        file = dataclasses.replace(file, batch=batch)
    part = None if args.part is None else parse_part(args.part)
    targets = [parse_report(text) for text in args.report]
    memory_bytes = None if args.memory is None else parse_size(args.memory)
    member = dataclasses.replace(who(), address=address, client_mode=args.client_mode)

    def run() -> None:
        from swarm_training.commands.joining import prepare, take_part

        signals.unwind_on_signals()
        say = partial(print, flush=True)
        with closing(open_reports(targets, file.run.name)) as reports:
            setup = prepare(file, member, part, args.device, say, memory_bytes)
            if targets:
                setup = dataclasses.replace(setup, reports=reports)
            take_part(setup, member, _reaching(backend).open_run, threading.Event(), say)

    return run


def _export(stages: Stages | None, args: argparse.Namespace) -> Command:
    file = read_run_file(args.run_file)
    return export_staged(partial(_required, stages), args, file, joining(args, file, "TRAINER"))


def _required(stages: Stages | None) -> StagesBackend:
    if stages is None:
        raise ValueError("this command cannot train in stages: expected `swarm train`")
    return stages()


def _reaching(backend: Backend | None) -> Backend:
    """Return ``backend``, or else the one that reaches runs over the network."""
    if backend is not None:
        return backend
    from swarm_training.core_backend import BACKEND

    return BACKEND


def _watch(backend: Backend | None, stages: Stages | None, args: argparse.Namespace) -> Command:
    file = read_run_file(args.run_file)
    if not _MIN_INTERVAL_S <= args.interval <= _MAX_INTERVAL_S:
        raise ValueError(
            f"--interval is {args.interval:g}: expected a number of seconds from {_MIN_INTERVAL_S:g} to 3600"
        )
    require_initial_peers(args, "members of the run that is to be watched")
    targets = [parse_report(text) for text in args.report]
    _, looking = _onlooker(backend, stages, args, file)

    def run() -> None:
        from swarm_training.commands.watching import as_json, watch
        from swarm_training.web.server import WatchServer

        signals.unwind_on_signals()
        observer = RunObserver(file.optimizer.rate, file.run.checkpoint_every)
        with ExitStack() as stack:
            reports = stack.enter_context(closing(open_reports(targets, file.run.name)))
            also: list[Callable[[RunView], object]] = [lambda view: reports.see(view, time.monotonic())]
            if args.web is not None:
                server = stack.enter_context(closing(WatchServer(args.web)))
                also.append(lambda view: server.show(view, as_json(view)))
                print(f"the run is shown at {server.url}", flush=True)
            look = stack.enter_context(looking())
            watch(
                lambda: observer.complete(look(), time.time()),
                args.interval,
                json_lines=args.json,
                in_terminal=args.web is None,
                also=also,
            )

    return run


def _ledger(backend: Backend | None, stages: Stages | None, args: argparse.Namespace) -> Command:
    from swarm_training.commands import summing

    file = read_run_file(args.run_file)
    if args.file is not None:
        _require_one_run(args, file)
    if (args.file is None) == (not args.initial_peers):
        raise ValueError("--initial-peers or --file: expected members of the run to ask, or else a ledger that is here")
    if args.file is not None:
        return lambda: summing.show([summing.ledger_in_file(args.file, file)], None, as_json=args.json)
    who, looking = _onlooker(backend, stages, args, file)
    runs = _required(stages).stage_runs(file, who) if file.stages.count else [who]

    def run() -> None:
        ledgers = [_reaching(backend).read_ledger(each) for each in runs]
        with looking() as look:
            view = look()
        summing.show(ledgers, view, as_json=args.json)

    return run


def _onlooker(
    backend: Backend | None, stages: Stages | None, args: argparse.Namespace, file: RunFile
) -> tuple[Joining, Callable[[], AbstractContextManager[Callable[[], RunView]]]]:
    """Return the identity of a process that only looks at the run, and how it looks."""
    if file.stages.count:  # peers of a stage report their progress to trainers alone; those of other runs, on the DHT
        who = joining(args, file, "TRAINER")
        return who, lambda: _required(stages).look(file, who)
    who = joining(args, file, "CLIENT")
    return who, lambda: _reaching(backend).look(who)


def _ban(backend: Backend | None, args: argparse.Namespace) -> Command:
    from swarm_training.ledger.orders import Ban, ModeratorOrder

    file = _moderated(args)
    if not 0 < args.hours <= _MAX_HOURS:
        raise ValueError(f"--hours is {args.hours:g}: expected a number above 0, up to {_MAX_HOURS:g}")
    who = joining(args, file, "MODERATOR")
    order = ModeratorOrder.new(file.run.name, Ban(args.peer_id, args.reason), time.time(), args.hours * 3600.0)

    def run() -> None:
        _reaching(backend).send_order(who, order.signed(who.identity, who.token))
        print(f"the run has received the order to ban {args.peer_id}")

    return run


def _rollback(backend: Backend | None, args: argparse.Namespace) -> Command:
    from swarm_training.ledger.orders import GoBack, ModeratorOrder

    file = _moderated(args)
    _require_one_run(args, file)
    if not 0 <= args.to_step <= _MAX_STEP:
        raise ValueError(f"--to-step is {args.to_step}: expected the number of a step, at least 0")
    who = joining(args, file, "MODERATOR")

    def run() -> None:
        with _reaching(backend).look(who) as view:
            seen = view()
        if not seen.peers:
            raise ValueError(f"no peer trains run {file.run.name} at present: expected a run that can go back")
        if args.to_step >= seen.step:
            raise ValueError(f"--to-step is {args.to_step}: expected less than {seen.step}, where the run is now")
        order = ModeratorOrder.new(file.run.name, GoBack(args.to_step, seen.rollbacks), time.time(), _ROLLBACK_LASTS_S)
        _reaching(backend).send_order(who, order.signed(who.identity, who.token))
        print(
            f"the run, at step {seen.step}, has received the order to go back to its newest checkpoint up to "
            f"{args.to_step}"
        )

    return run


def _require_one_run(args: argparse.Namespace, file: RunFile) -> None:
    """Raise ValueError if the file is of a run in stages, where each stage is a run of its own."""
    if file.stages.count:
        raise ValueError(f"{args.run_file} is of a run in stages: expected one whose peers hold the whole model")


def _moderated(args: argparse.Namespace) -> RunFile:
    """Return the run file. Raises ValueError if the run has no moderators, or no initial peers are given."""
    file = read_run_file(args.run_file)
    if not file.tokens.organiser:
        raise ValueError(f"{args.run_file} names no organiser under [tokens]: without one, a run has no moderators")
    require_initial_peers(args, "members of the run that the order is for")
    return file


def main(
    argv: list[str],
    backend: Backend | None = None,
    all_parsers: Callable[[], Parsers] | None = None,
    stages: Stages | None = None,
) -> None:
    run_command(lambda: parse_args(argv or ["--help"], backend, all_parsers, stages))
