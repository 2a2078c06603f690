"""The flags of ``swarm quantize``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from swarm_cli.commands.flags import Command, Commands
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, add_gguf_flag, check_location, locate, with_gguf_file
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command, add_common_flags

_MIN_TOKENS = 256  # ``WINDOW`` of calibration.py, whose import takes seconds


def add_quantize(commands: Commands) -> None:
    parser = add_command(
        commands,
        "quantize",
        quantize_command,
        help="write a checkpoint in 4 bits that --quant int4 takes as it is",
        description="Rounds each weight so that the outputs of its layer for a text change least. Servers round "
        "without a text, which costs more quality. The directory can be given to servers and clients as --model.",
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH", help="name on the hub, directory or GGUF file")
    add_gguf_flag(parser)
    add("--revision", help="branch, tag or commit of a hub model")
    add("--output", type=Path, required=True, metavar="DIRECTORY", help="where to write; must not exist yet")
    add("--text", type=Path, metavar="FILE", help="text like that of the model's users; by default a mixed one")
    add("--tokens", type=int, default=4096, metavar="N", help="tokens of the text that are used, at most")
    add_common_flags(parser)


def quantize_command(args: argparse.Namespace) -> Command:
    model = locate(with_gguf_file(args.model, args.gguf_file))
    check_location(model, args.revision)
    if os.path.lexists(args.output):
        raise ValueError(f"--output {args.output} exists already: expected a new directory")
    if args.text is not None and not args.text.is_file():
        raise ValueError(f"--text {args.text} is not there: expected a file of text")
    if args.tokens < _MIN_TOKENS:
        raise ValueError(f"--tokens is {args.tokens}: expected at least {_MIN_TOKENS}")

    def run() -> None:
        from swarm_cli.quantize.quantize import quantize_checkpoint

        signals.unwind_on_signals()
        quantize_checkpoint(model, args.revision, args.output, args.text, args.tokens)

    return run
