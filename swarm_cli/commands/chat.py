"""The command ``swarm chat``."""

from __future__ import annotations

import argparse
import sys

from swarm_cli.commands.flags import SAMPLING, Command, Commands, add_model_flags, model_choice
from swarm_client.generation.text_options import ANSWER_TOKENS, TextOptions
from swarm_protocol.imports.light_imports import import_for_text
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command


def add_chat(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        chat_command,
        help="a conversation with a model",
        description="Enter ends a turn, Alt+Enter or a backslash at its end begins another line; without a terminal, "
        "each line of input is a turn. Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation, and /help shows "
        "the other commands. The model's chat template joins the turns; a model without one continues the text.",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=ANSWER_TOKENS, metavar="N", help="most tokens of an answer"
    )


def chat_command(args: argparse.Namespace) -> Command:
    options = TextOptions(max_new_tokens=args.max_new_tokens, **SAMPLING.values(args))
    choice = model_choice(args)

    def run() -> None:
        import_for_text()
        from swarm_cli.chat.chat import Chat
        from swarm_cli.chat.loop import run as answer
        from swarm_cli.chat.terminal import PipeReader, TerminalReader, greeting, log_lines_dimmed

        signals.unwind_on_signals()
        with Chat(choice, options) as chat:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                answer(chat, PipeReader(), interactive=False)
                return
            reader = TerminalReader()
            reader.say(greeting(chat.choice.model))
            with log_lines_dimmed():
                answer(chat, reader, interactive=True)

    return run
