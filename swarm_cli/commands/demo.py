"""The command ``swarm demo``."""

from __future__ import annotations

import argparse

from swarm_cli.commands.flags import Command, Commands
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, SMALL_CHAT_MODEL, check_location, locate
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command, add_common_flags


def add_demo(commands: Commands) -> None:
    parser = add_command(
        commands, "demo", demo_command, help="show servers that write text together while one of them is killed"
    )
    parser.add_argument("prompt", nargs="?", default=None, help="a question, if the model has a chat template")
    parser.add_argument(
        "--model",
        default=None,
        metavar="NAME_OR_PATH",
        help=f"hub name, directory or GGUF file; by default {SMALL_CHAT_MODEL} if installed, else {DEFAULT_MODEL}",
    )
    parser.add_argument("--max-new-tokens", type=int, default=TextOptions.max_new_tokens, metavar="N")
    add_common_flags(parser)


def demo_command(args: argparse.Namespace) -> Command:
    options = TextOptions(max_new_tokens=args.max_new_tokens, temperature=0)
    if args.model is not None:
        check_location(locate(args.model))

    def run() -> None:
        import_for_text()
        from swarm_cli.demo.demo import run_demo

        signals.unwind_on_signals()
        run_demo(args.model, args.prompt, options)

    return run
