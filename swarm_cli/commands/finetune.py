"""The command ``swarm finetune --data FILE --output DIR``."""

from __future__ import annotations

import argparse
import shlex
import sys

from swarm_cli.commands.flags import SWARM, Command, Commands, add_swarm_flags, check_access
from swarm_cli.finetune.settings import FLAGS, FinetuneSettings, check_file
from swarm_client.generation.opening import check_model_name
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command, typed


def add_finetune(commands: Commands) -> None:
    parser = add_command(
        commands,
        "finetune",
        finetune_command,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="train an adapter or prompts on a file of text",
        epilog='A line of .jsonl is {"text": "…"}, or {"prompt": "…", "completion": "…"}, of which the completion is '
        "learned.",
    )
    add_swarm_flags(parser)
    FLAGS.add_to(parser)


def finetune_command(args: argparse.Namespace) -> Command:
    settings = FinetuneSettings(**FLAGS.values(args), **SWARM.values(args))
    check_access(settings.client_config())
    check_model_name(settings.model, settings.revision)
    for path in (settings.data, settings.validation):
        if path is not None:
            check_file(path)
    command = f"{typed()} {shlex.join(sys.argv[1:])}"

    def run() -> None:
        from swarm_cli.finetune.finetune import run_finetune

        signals.unwind_on_signals()
        if not run_finetune(settings, command):
            sys.exit(signals.INTERRUPTED)

    return run
