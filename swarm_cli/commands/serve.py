"""The command ``swarm serve``."""

from __future__ import annotations

import argparse
import sys

from swarm_cli.commands.flags import Command, Commands, add_remote_flags, remote_config
from swarm_gateway.app.serving import ServeSettings, add_serve_flags, serve, serve_by_workers
from swarm_models.checkpoints.default_model import named_model
from swarm_protocol.access.member_flags import CONFIG_RULES
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import apply_config
from swarm_protocol.process.invocation import add_command, command_like_this, typed


def add_serve(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        serve_command,
        help="an OpenAI-compatible HTTP API over a swarm",
        description="Serves --model and every other model of the swarm, at /v1/chat/completions, /v1/completions and "
        "/v1/models; /health and /metrics are for operators.",
    )
    _add_flags(parser)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_remote_flags(parser)
    add_serve_flags(parser)


def parse_serve(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments that follow ``serve``. Raise ValueError if the configuration file is wrong."""
    parser = argparse.ArgumentParser(prog=typed("serve"))
    _add_flags(parser)
    apply_config({("serve",): parser}, argv, CONFIG_RULES)
    return parser.parse_args(argv)


def serve_command(args: argparse.Namespace) -> Command:
    config, settings = remote_config(args), ServeSettings.from_flags(args)

    def run() -> None:
        if settings.workers > 1 and settings.share is None:
            signals.unwind_on_signals()
            return serve_by_workers(settings, [*command_like_this("serve"), *sys.argv[2:]])  # the flags as typed
        import_for_text()
        signals.unwind_on_signals()
        serve(settings, config, named_model(args), args.revision)

    return run
