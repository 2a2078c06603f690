"""The command ``swarm keys``: the organiser's key, members, and revocations."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_cli.commands.flags import WHICH_SWARM, Command, Commands
from swarm_client.core.config import ClientConfig
from swarm_protocol.config_flags import ConfigFlags
from swarm_protocol.failures import undone_on_error
from swarm_protocol.process.invocation import add_command, add_common_flags

if TYPE_CHECKING:
    from swarm_protocol.access.organiser import OrganiserKey

_DAY_S = 24 * 3600.0
_MAX_DAYS = 3660.0
_SWARM = ConfigFlags(ClientConfig, *WHICH_SWARM)


def add_keys(commands: Commands) -> None:
    parser = commands.add_parser(
        "keys",
        help="private swarms: the organiser's key, members, revocations",
        description="A private swarm takes only members, whom its organiser names.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], Command], text: str) -> argparse.ArgumentParser:
        subparser = add_command(actions, name, run, help=text, description=text)
        if name != "identity":
            subparser.add_argument(
                "--key",
                type=Path,
                metavar="FILE",
                help="the organiser's key; by default one in the user's configuration",
            )
        add_common_flags(subparser)
        return subparser

    add = action("create", _create, "make the organiser's key, and print its public half: the swarm key").add_argument
    add("--out", type=Path, dest="key", metavar="FILE", help="the same as --key")
    add = action("grant", _grant, "make somebody a member: writes a membership file").add_argument
    add("--role", required=True, metavar="ROLE", help="server, client, trainer (a client that trains) or moderator")
    add("--name", required=True, dest="member", metavar="NAME", help="name of the member in lists")
    add("--days", required=True, type=float, metavar="N", help="duration of the membership; may be a fraction")
    add("--peer", metavar="PEER_ID", help="peer with a key of its own; else the file has a new key, and is secret")
    add("--out", type=Path, metavar="FILE", help="file to write; by default NAME.membership in this directory")
    revoke = action("revoke", _revoke, "revoke grants, at once if the swarm runs")
    revoke.add_argument("grants", nargs="+", metavar="NAME_OR_ID", help="names or ids, as `swarm keys list` shows them")
    _SWARM.add_to(revoke)
    _SWARM.add_to(action("publish", _publish, "publish all revocations to a swarm again"))
    action("list", _list, "show what was granted").add_argument("--json", action="store_true", help="print JSON")
    identity = action("identity", _identity, "print the peer id of a key file, which is created if it is missing")
    identity.add_argument("file", type=Path, metavar="FILE")


def _create(args: argparse.Namespace) -> Command:
    from swarm_protocol.access.organiser import OrganiserKey

    path = _key_path(args)

    def run() -> None:
        key = OrganiserKey.generate()
        key.save(path)
        print(f"wrote {path}: keep it secret, and keep a copy. This is the swarm key:", file=sys.stderr)
        print(key.public)

    return run


def _grant(args: argparse.Namespace) -> Command:
    from swarm_cli.keys.grants import GrantsFile
    from swarm_protocol.access.membership import MemberCredentials
    from swarm_protocol.access.tokens import Grant, Role
    from swarm_protocol.net.identity import Identity

    role = Role.parse(args.role)
    if not 0 < args.days <= _MAX_DAYS:
        raise ValueError(f"--days is {args.days:g}: expected a number above 0, up to {_MAX_DAYS:g}")
    # The base58 form of a SHA-256, which the peer ids of RSA keys are.
    if args.peer is not None and not re.fullmatch("Qm[1-9A-HJ-NP-Za-km-z]{44}", args.peer):
        raise ValueError(f"--peer {args.peer!r} is no peer id: expected what `swarm keys identity` prints")
    if args.out is None and not re.fullmatch(r"\w[\w.-]*", args.member):
        raise ValueError(f"the name of the member {args.member!r} cannot be that of a file: give a file by --out")
    path = args.out or Path(f"{args.member}.membership")
    key = _key(args)
    identity = None if args.peer else Identity.generate()
    now = time.time()
    peer_id = identity.peer_id if identity is not None else args.peer
    grant = Grant.new(key.public, role, args.member, peer_id, now, now + args.days * _DAY_S)

    def run() -> None:
        MemberCredentials(grant, grant.signed(key), identity).write(path)
        # A grant that is not in the list could not be revoked by name.
        with undone_on_error(lambda: path.unlink(missing_ok=True)):
            GrantsFile(_key_path(args)).add(grant)
        who = "secret: hand it over safely" if identity is not None else "of use only with the key of that peer"
        print(f"wrote {path}, which is {who}. The member gives --membership {path}", file=sys.stderr)
        print(path)

    return run


def _revoke(args: argparse.Namespace) -> Command:
    from swarm_cli.keys.grants import GrantsFile

    key, config = _key(args), ClientConfig(**_SWARM.values(args))

    def run() -> None:
        revoked = GrantsFile(_key_path(args)).revoke(args.grants)
        for entry in revoked:
            print(f"revoked {entry.name} ({entry.role}, {entry.id})")
        from swarm_cli.keys.publishing import publish  # what is revoked is noted, even if libp2p is missing

        publish(config, key, revoked)

    return run


def _publish(args: argparse.Namespace) -> Command:
    from swarm_cli.keys.grants import GrantsFile

    key, config = _key(args), ClientConfig(**_SWARM.values(args))

    def run() -> None:
        from swarm_cli.keys.publishing import publish

        revoked = GrantsFile(_key_path(args)).revoked()
        if revoked:
            publish(config, key, revoked)
        print(f"published {len(revoked)} revocation{'' if len(revoked) == 1 else 's'}")

    return run


def _list(args: argparse.Namespace) -> Command:
    from swarm_cli.keys.grants import GrantsFile

    entries = GrantsFile(_key_path(args)).read()

    def run() -> None:
        if args.json:
            print(json.dumps([{**asdict(entry), "state": entry.state} for entry in entries], indent=2))
            return
        rows = [("name", "role", "expires", "state", "peer", "id")]
        for entry in entries:
            until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.expires_at))
            rows.append((entry.name, entry.role, until, entry.state, entry.peer_id, entry.id))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    return run


def _identity(args: argparse.Namespace) -> Command:
    from swarm_protocol.net.identity import Identity

    def run() -> None:
        path = args.file
        # ``load_or_create`` would fail if a server runs, which has locked the file.
        print((Identity.load(path) if path.exists() else Identity.load_or_create(path)).peer_id)

    return run


def _key(args: argparse.Namespace) -> OrganiserKey:
    from swarm_protocol.access.organiser import OrganiserKey

    return OrganiserKey.load(_key_path(args))


def _key_path(args: argparse.Namespace) -> Path:
    if args.key is not None:
        return Path(args.key)
    import platformdirs

    return platformdirs.user_config_path("swarm") / "organiser.key"
