"""Command line of experts: ``swarm experts serve``.

The ready line contains what clients and other servers need:
``ready name=N initial_peer=MULTIADDR peer_id=… experts=N.3.7,…``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from swarm_protocol.access.member_flags import CONFIG_RULES, MEMBERSHIP
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import Parsers, apply_config, leaves
from swarm_protocol.process.invocation import CONSOLE_SCRIPT, add_common_flags, run_command
from swarm_protocol.wire.constants import MIB
from swarm_training.experts.core.cells import check_grid, check_name, expert_name, parse_expert_name
from swarm_training.experts.core.config import ExpertServerConfig

_CHECK_EVERY_S = 1.0
_COMMAND = "experts"
_MAX_MIB = 1 << 20


def _bytes_of_mib(mib: float) -> int:
    if not 0 <= mib < _MAX_MIB:
        raise ValueError(f"--replica-memory is {mib:g}: expected 0 to {_MAX_MIB} MiB")
    return int(mib * MIB)


_MIXTURE = ConfigFlags(
    ExpertServerConfig,
    Flag("name", "of the mixture: letters, digits, hyphens, underscores"),
    Flag("hidden", "size of a row", metavar="N"),
    Flag("grid", "sizes of its dimensions", metavar="N"),
)
_EXPERTS = ConfigFlags(
    ExpertServerConfig,
    Flag("num_experts", "number of experts to host, in free cells", name="experts", metavar="N"),
    Flag("kind", "kind of expert"),
)
_HOSTING = ConfigFlags(
    ExpertServerConfig,
    Flag("learning_rate", "learning rate of Adam; 0: experts are not trained"),
    Flag("max_grad_norm", "norm to which the gradients of a batch are clipped"),
    Flag("initial_peers", "servers of experts; none: a new DHT", metavar="MULTIADDR"),
    Flag("host", "address to listen on"),
    Flag("port", "port of the service; 0: any free port"),
    Flag("dht_port", "port of the DHT; 0: any free port"),
    Flag("announce_host", "address that others use, if it differs from --host; needs both ports", metavar="HOST"),
    Flag("directory", "directory where experts are saved, and from which they are loaded"),
    Flag("save_every_s", metavar="SECONDS"),
    Flag("replicas", "number of other servers that keep a replica of each expert", metavar="N"),
    Flag("replicate_every_s", metavar="SECONDS"),
    Flag(
        "replica_bytes",
        "memory for replicas of other servers' experts; 0: none are kept",
        name="replica-memory",
        metavar="MIB",
        kind=float,
        default=ExpertServerConfig.replica_bytes / MIB,
        read=_bytes_of_mib,
    ),
    Flag("adopt", "number of experts to adopt whose server is gone", metavar="N"),
    Flag("adopt_after_s", "time for which the server must be gone", metavar="SECONDS"),
)


def make_parser() -> argparse.ArgumentParser:
    is_script = Path((sys.argv or [""])[0]).name == CONSOLE_SCRIPT
    parser = argparse.ArgumentParser(
        prog=f"{CONSOLE_SCRIPT} {_COMMAND}" if is_script else "python -m swarm_training.experts",
        description="Host experts of a mixture.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "host experts of a mixture, and train them, until Ctrl-C"
    serve = commands.add_parser(
        "serve", help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _MIXTURE.add_to(serve)
    serve.add_argument(
        "--cells", nargs="+", default=[], metavar="CELL", help="cells to host, such as 3.7, instead of free cells"
    )
    _EXPERTS.add_to(serve)
    serve.add_argument(
        "--import",
        dest="modules",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="module with kinds of experts",
    )
    _HOSTING.add_to(serve)
    identity = "this server's key, created if it is missing; by default a new key"
    serve.add_argument("--identity", type=Path, metavar="FILE", help=identity)
    serve.add_argument("--membership", type=Path, metavar="FILE", help=MEMBERSHIP.help)
    add_common_flags(serve, "info")
    serve.set_defaults(command=_command)
    return parser


def parse_args(argv: list[str], all_parsers: Callable[[], Parsers] | None = None) -> argparse.Namespace:
    """Parse the arguments; for ``all_parsers``, see ``apply_config``. Raise ValueError if the config file is wrong."""
    parser = make_parser()
    apply_config(dict(leaves(parser, (_COMMAND,))), argv, CONFIG_RULES, all_parsers)
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> ExpertServerConfig:
    """Return the configuration of these arguments. Raise ValueError if a flag is wrong."""
    for peer in args.initial_peers:
        check_peer(peer)
    values = {**_MIXTURE.values(args), **_EXPERTS.values(args), **_HOSTING.values(args)}
    cells = tuple(parse_expert_name(text, check_name(args.name), check_grid(args.grid)) for text in args.cells)
    return ExpertServerConfig(**{**values, "cells": cells, "num_experts": len(cells) or args.experts})


def serve(config: ExpertServerConfig, identity_file: Path | None, membership: Path | None) -> None:
    """Serve experts until a signal comes; a second signal ends the process at once.

    Raises:
        ValueError, SwarmError: see ``ExpertServer``; or its libp2p daemon has ended.
    """
    stopping = threading.Event()

    def stop(number: int, _frame: object) -> None:
        if number == signals.HANGUP:
            signals.leave_terminal()
        elif stopping.is_set():
            os._exit(signals.INTERRUPTED)
        stopping.set()

    import torch

    from swarm_protocol.net.identity import Identity
    from swarm_training.experts.server.expert_server import ExpertServer

    torch.seed()  # otherwise, the experts of all servers would begin with the same weights
    identity = Identity.load_or_create(identity_file) if identity_file is not None else None
    for number in signals.all_ending_signals():
        signal.signal(number, stop)
    with ExpertServer(config, identity, membership=membership) as server:
        experts = ",".join(expert_name(config.name, cell) for cell in sorted(server.experts))
        peer = server.initial_peers[0]
        print(f"ready name={config.name} initial_peer={peer} peer_id={server.peer_id} experts={experts}", flush=True)
        while not stopping.wait(_CHECK_EVERY_S):
            server.check()


def _command(args: argparse.Namespace) -> Callable[[], None]:
    config = read_config(args)
    try:
        for name in args.modules:
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--import: {error}") from None
    return lambda: serve(config, args.identity, args.membership)


def main(argv: list[str] | None = None, all_parsers: Callable[[], Parsers] | None = None) -> None:
    run_command(lambda: parse_args((sys.argv[1:] if argv is None else argv) or ["--help"], all_parsers))
