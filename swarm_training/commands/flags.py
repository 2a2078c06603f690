"""The flags that several commands of ``swarm train`` share, and their meaning together with the run file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.net.hosts import split_address
from swarm_protocol.process.invocation import add_command, add_common_flags
from swarm_training.contract.backend import Joining, PeerAddress
from swarm_training.data.order import DataShard
from swarm_training.reports.reporter import EXPECTED
from swarm_training.runfile.settings import RunFile

RoleName = Literal["TRAINER", "CLIENT", "MODERATOR"]


def add_run_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace], Callable[[], None]],
    text: str,
) -> argparse.ArgumentParser:
    """Add a command that acts on a run, with the flags that every command has; ``text`` says what it does."""
    parser = add_command(commands, name, command, help=text, description=text)
    add_common_flags(parser)
    return parser


def add_joining_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_file", type=Path, metavar="RUN.toml")
    add(
        "--initial-peers",
        nargs="+",
        default=[],
        metavar="MULTIADDR",
        help="members of the run; without any, `join` founds it",
    )
    add("--membership", type=Path, metavar="FILE", help="membership from the organiser of a private run")
    add("--identity", type=Path, metavar="FILE", help="this peer's key, created if it is missing; by default a new key")


def require_initial_peers(args: argparse.Namespace, expected: str) -> None:
    """Raise ValueError, which says what is ``expected``, if there are no initial peers."""
    if not args.initial_peers:
        raise ValueError(f"--initial-peers is missing: expected {expected}")


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", metavar="ADDRESS", help="address to listen on; by default that of the route to the initial peers")
    add("--port", type=int, default=0, help="port of the service; 0: any free port")
    add("--dht-port", type=int, default=0, help="port of the DHT; 0: any free port")
    add("--announce-host", metavar="ADDRESS", help="address at which others reach this machine")


def address_of(args: argparse.Namespace, announcing: str = "announce_host") -> PeerAddress:
    """Return the address that the flags give. ``announcing``: the argument with the host that is announced. Raise
    ValueError if a port is not 0 to 65535, the host to announce has a port or lacks --dht-port, or others could not
    call this peer at its address."""
    for name in ("port", "dht_port"):
        if not 0 <= getattr(args, name) < 1 << 16:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected 0 to 65535")
    announced, flag = getattr(args, announcing), f"--{announcing.replace('_', '-')}"
    if announced is None:
        if args.host is not None and args.host.strip("[]") in ("0.0.0.0", "::"):
            raise ValueError(f"--host is {args.host}, which nobody can call: expected {flag} with it")
        return PeerAddress(args.host, args.port, args.dht_port)
    host, port = split_address(announced, 0)
    if port:
        raise ValueError(f"{flag} is {announced!r}: expected a host alone; its ports are --port and --dht-port")
    if not args.dht_port:
        raise ValueError(f"{flag} is {announced!r}: expected --dht-port with it, for others to call")
    if args.host is None and not args.initial_peers:
        raise ValueError(f"{flag} is {announced!r}: expected --host with it; who founds a run else listens on loopback")
    return PeerAddress(args.host, args.port, args.dht_port, host)


def add_report_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help=f"where the numbers of each step go, {EXPECTED}; may be given several times",
    )


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--best", action="store_true", help="write the step with the lowest loss on held-out data")
    parser.add_argument(
        "--averaged", action="store_true", help="write the moving average of the weights instead, see `average_decay`"
    )


def joining(args: argparse.Namespace, file: RunFile, role: RoleName, *, locks: bool = False) -> Joining:
    """Return how this peer joins. Raises ValueError if a flag is wrong, or the membership is not for this role.
    ``locks``: see ``joining_as``."""
    return joining_as(role, file, args.initial_peers, args.membership, args.identity, locks=locks)


def joining_as(
    role: RoleName,
    file: RunFile,
    initial_peers: Sequence[str],
    membership: Path | None,
    identity: Path | None,
    *,
    locks: bool = False,
) -> Joining:
    """Return how this peer joins. ``locks``: whether a membership that has a key is locked, because two peers with one
    key would be the same peer; commands that only look may share it.

    Raises ValueError if a value is wrong, the membership is not for this role, or another process has locked it."""
    for peer in initial_peers:
        check_peer(peer)
    from swarm_protocol.access.swarm_access import read_member
    from swarm_protocol.access.tokens import Role
    from swarm_protocol.net.identity import Identity, locked_key_file

    own = Identity.load_or_create(identity) if identity is not None else None
    averaging = file.averaging
    join = partial(
        Joining,
        file.run.name,
        file.run.target_batch_size,
        tuple(initial_peers),
        config=file.peer_config,
        power_sgd_rank=averaging.power_sgd_rank,
        error_feedback=averaging.error_feedback,
    )
    if not file.tokens.organiser:
        if membership is not None:
            raise ValueError("--membership is for a run with an organiser: this run file names none under [tokens]")
        return join(own or Identity.generate())
    member = read_member(Role[role], membership, file.tokens.organiser)
    if member is None:
        raise ValueError("the run takes only members: ask its organiser, and give --membership FILE")
    own = member.identity_or(own)
    if locks and membership is not None and member.identity is not None:
        own = Identity(member.identity.private_key, locked_key_file(membership))
    return join(own, member.grant.swarm_key, member.token)


def parse_part(text: str) -> DataShard:
    """Parse a part: ``2/5`` is the second of five. Raises ValueError if the text is no part."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part is {text!r}: expected K/N, such as 2/5 for the second of five parts")
    return DataShard(int(found[1]) - 1, int(found[2]))


def parse_batch_size(text: str) -> int:
    """Parse a batch size; return 0 for ``auto``. Raises ValueError if the text is neither ``auto`` nor a number."""
    if text == "auto":
        return 0
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise ValueError(f"--batch-size is {text!r}: expected auto, or at least 1")
    return int(text)
