"""The command ``swarm generate "Return a list of"``."""

from __future__ import annotations

import argparse

from swarm_cli.commands.flags import SAMPLING, Command, Commands, add_model_flags, model_choice
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command

_SEARCH = ConfigFlags(TextOptions, Flag("max_new_tokens", metavar="N"), Flag("num_beams", metavar="N"))


def add_generate(commands: Commands) -> None:
    parser = add_command(commands, "generate", generate_command, help="continue a text, printing it as it is written")
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
