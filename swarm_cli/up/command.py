"""The flags of ``swarm up``, and the commands that it runs with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial

from swarm_cli.commands.flags import WHICH_SWARM, Command, Commands, remote_config
from swarm_cli.commands.serve import parse_serve
from swarm_client.core.config import ClientConfig
from swarm_gateway.app.serving import ServeSettings, listen
from swarm_models.checkpoints.default_model import add_gguf_flag, add_model_flag
from swarm_protocol.access.member_flags import ENVIRONMENT
from swarm_protocol.config_flags import ConfigFlags
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command, add_common_flags, command_like_this

_BOTH = ("model", "revision", "gguf_file", "initial_peers", "discover", "swarm", "log_level", "log_format", "config")
_SERVER = ("quant", "memory", "device", "host", "no_live_line")
_GATEWAY = ("port",)
_GATEWAY_LEAVE_S = 30.0  # its answers get 5 s; then it leaves the swarm


def add_up(commands: Commands) -> None:
    parser = add_command(
        commands,
        "up",
        up_command,
        help="share this machine and open a chat: a server, a gateway and a browser at once",
        description="Runs `server` and `serve` until Ctrl-C, which ends both in order. Other flags of the two are "
        "taken from their tables in the configuration file.",
    )
    add = parser.add_argument
    add_model_flag(parser)
    add("--revision", help="branch, tag or commit of a hub model")
    add_gguf_flag(parser)
    ConfigFlags(ClientConfig, *WHICH_SWARM).add_to(parser)
    add("--host", metavar="ADDRESS", help="address of this machine, by which other machines join; by default none can")
    add("--port", type=int, metavar="N", help="port of the pages and APIs; 0: any free port; by default 8000")
    add("--quant", help="quantisation of the blocks: int8 (the default), int4 (on CPU), fp8 (on new GPUs), nf4 or none")
    add("--memory", metavar="SIZE", help="memory for blocks, keys and values, such as 4GiB; by default what is free")
    add("--device", help="device of the blocks: cpu, cuda, cuda:1, …; by default a GPU if there is one")
    add("--no-browser", action="store_true", help="do not open the chat page")
    add("--no-live-line", action="store_true", help="do not show the status line below the log lines")
    add_common_flags(parser)


def up_command(args: argparse.Namespace) -> Command:
    from swarm_server.command_line import check_files, parse_args, read_config
    from swarm_server.running import LEAVE_S

    server_flags, gateway_flags = _flags(args, (*_BOTH, *_SERVER)), _flags(args, (*_BOTH, *_GATEWAY))
    server = read_config(parse_args(server_flags))
    serve = parse_serve(gateway_flags)
    settings, client = ServeSettings.from_flags(serve), remote_config(serve)
    if os.environ.get(ENVIRONMENT) or (server.membership and server.membership == client.membership):
        raise ValueError(
            "server and gateway are two members: expected a membership in each of the tables [server] and [serve] of "
            "the configuration file"
        )
    check_files(server)
    listen(settings.host, settings.port).close()  # a port that is taken is an error now, not when the server is ready

    def run() -> None:
        from swarm_cli.up.running import is_browser_wanted, look_at, open_page, run_up
        from swarm_cli.up.supervisor import ChildProcess

        def start_server() -> ChildProcess:
            leave_s = server.drain_timeout_s + LEAVE_S
            return ChildProcess("server", [*command_like_this("server"), *server_flags], leave_s)

        def start_gateway() -> ChildProcess:
            command = [*command_like_this("serve"), *gateway_flags]
            return ChildProcess("gateway", command, _GATEWAY_LEAVE_S, is_relayed=True)

        signals.unwind_on_signals()
        opens = not args.no_browser and is_browser_wanted(sys.stdout.isatty(), os.environ)
        show_page: Callable[[str], None] = open_page if opens else lambda _page: None
        run_up(start_server, start_gateway, partial(look_at, keys=settings.keys), show_page)

    return run


def _flags(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return these flags as they would be typed, without those that are not set."""
    typed: list[str] = []
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if isinstance(value, list):
            typed += [flag, *value] if value else []
        elif value is True:
            typed.append(flag)
        elif value is not None and value is not False:
            typed.append(f"{flag}={value}")
    return typed
