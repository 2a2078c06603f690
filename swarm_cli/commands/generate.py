"""The command ``swarm generate "Return a list of"``."""

from __future__ import annotations

import argparse

from swarm_cli.commands.flags import SAMPLING, add_model_flags, add_swarm_flags, model_choice
from swarm_cli.commands.types import WITH_DEFAULTS, Command, Commands
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals

_SEARCH = ConfigFlags(TextOptions, Flag("max_new_tokens", metavar="N"), Flag("num_beams", metavar="N"))


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate", formatter_class=WITH_DEFAULTS, help="continue a text, printing it as it is written"
    )
    parser.set_defaults(command=generate_command)
    add_swarm_flags(parser)
    add_model_flags(parser)
    parser.add_argument("prompt")
    _SEARCH.add_to(parser)


def generate_command(args: argparse.Namespace) -> Command:
    options = TextOptions(**SAMPLING.values(args), **_SEARCH.values(args))
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
