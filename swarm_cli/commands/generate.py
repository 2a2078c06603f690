"""The command ``swarm generate "Return a list of"``."""

from __future__ import annotations

import argparse

from swarm_cli.commands.flags import add_model_flags, add_swarm_flags, model_choice, text_options
from swarm_cli.commands.types import WITH_DEFAULTS, Command, Commands
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate", formatter_class=WITH_DEFAULTS, help="continue a text, printing it as it is written"
    )
    parser.set_defaults(command=generate_command)
    add_swarm_flags(parser)
    add_model_flags(parser)
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=TextOptions.max_new_tokens, metavar="N")
    parser.add_argument("--num-beams", type=int, default=TextOptions.num_beams, metavar="N")


def generate_command(args: argparse.Namespace) -> Command:
    options = text_options(args, num_beams=args.num_beams)
    if not args.prompt:
        raise ValueError("the prompt is empty: expected some text to continue")
    choice = model_choice(args)

    def run() -> None:
        import_for_text()
        from swarm_client.generation.generation import stream_text
        from swarm_client.generation.opening import tokenizer_of

        signals.unwind_on_signals()
        with choice.connect() as model:
            stream_text(model, tokenizer_of(model), args.prompt, options)

    return run
