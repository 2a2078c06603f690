"""The commands that a user can type instead of turns: ``/model NAME``, ``/retry``, ``/save FILE`` …"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from swarm_cli.chat import transcript
from swarm_cli.chat.chat import Chat
from swarm_client.generation.opening import ModelChoice
from swarm_client.generation.text_options import TextOptions

NONE = "none"
Say = Callable[[str], None]  # prints text that is no answer
SETTINGS = tuple(field.name for field in fields(TextOptions) if field.name != "num_beams")
_WHOLE = {"max_new_tokens", "top_k", "seed"}


@dataclass(frozen=True)
class SlashCommand:
    """A command that begins with a slash. ``run`` gets the text after its name; the chat ends if it returns False.

    Attributes:
        takes: a name for that text; empty if there is none, in brackets if it is optional.
    """

    takes: str
    text: str
    run: Callable[[Chat, str, Say], object]


def carry_out(chat: Chat, text: str, say: Say) -> bool:
    """Run a turn or a command; return whether the conversation continues.

    Raises:
        ValueError: there is no such command, or it cannot do this.
        SwarmError: see ``swarm_protocol.errors``.
    """
    if text.startswith("//"):  # a turn that begins with a slash
        chat.conversation.answer(text[1:])
        return True
    found = re.match(r"(/\w+!?)(?!\S)\s*", text)
    if found is None:
        if text:
            chat.conversation.answer(text)
        return True
    name, argument = found[1], text[found.end() :]
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(f"there is no command {name}: expected one of {' '.join(COMMANDS)}, or // for a turn with /")
    if argument and not command.takes:
        raise ValueError(f"{name} takes nothing, but {argument!r} was given")
    if command.takes and not command.takes.startswith("[") and not argument:
        raise ValueError(f"{name} needs {command.takes}")
    return command.run(chat, argument, say) is not False


def _model(chat: Chat, name: str, say: Say) -> None:
    if name:
        _switch(chat, ModelChoice(name, chat.choice.config), say)
    else:
        say(_named(chat.choice))


def _adapter(chat: Chat, name: str, say: Say) -> None:
    if name:
        adapter = "" if name == NONE else os.path.expanduser(name)
        _switch(chat, replace(chat.choice, adapter=adapter), say)
    else:
        say(_named(chat.choice))


def _switch(chat: Chat, choice: ModelChoice, say: Say) -> None:
    chat.switch(choice)
    say(f"now with {_named(choice)}")
    if chat.conversation.system and not chat.conversation.has_template:
        say("this model has no chat template: the system prompt is left out")


def _named(choice: ModelChoice) -> str:
    return f"model {choice.model}" + (f" and adapter {choice.adapter}" if choice.adapter else "")


def _system(chat: Chat, text: str, say: Say) -> None:
    if text:
        chat.conversation.set_system("" if text == NONE else text)
    else:
        say(chat.conversation.system or "there is no system prompt")


def _save(chat: Chat, name: str, say: Say, *, overwrite: bool = False) -> None:
    path = Path(name).expanduser()
    transcript.save(path, chat.choice.model, chat.conversation.messages, overwrite=overwrite)
    say(f"saved to {path}")


def _load(chat: Chat, name: str, say: Say) -> None:
    messages = transcript.load(Path(name).expanduser())
    chat.conversation.load(messages)
    if chat.conversation.system and not chat.conversation.has_template:
        say("this model has no chat template: the system prompt is left out")
    say(f"{sum(message['role'] == 'user' for message in messages)} turns, which the model reads at the next one")


def _set(chat: Chat, argument: str, say: Say) -> None:
    options = chat.conversation.options
    if not argument:
        shown = {name: getattr(options, name) for name in SETTINGS}
        say("\n".join(f"{name} {'of the model' if value is None else value}" for name, value in shown.items()))
        return
    given, _, text = argument.partition(" ")
    name = given.replace("-", "_")
    if name not in SETTINGS:
        raise ValueError(f"there is no setting {given!r}: expected one of {', '.join(SETTINGS)}")
    chat.conversation.set_option(name, _number(name, text.strip()))


def _number(name: str, text: str) -> Any:
    """Return the number in ``text``; None stands for the model's own value."""
    if text == NONE and name != "max_new_tokens":
        return None
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise ValueError(f"{name} is {text!r}: expected {kind}, as in /set {name} 1") from None


def _help() -> str:
    width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items())
    return "\n".join(f"{f'{name} {command.takes}':{width}}  {command.text}" for name, command in COMMANDS.items())


COMMANDS = {
    "/help": SlashCommand("", "shows this", lambda _chat, _argument, say: say(_help())),
    "/model": SlashCommand("[NAME]", "goes on with another model of the swarm, or shows which one answers", _model),
    "/adapter": SlashCommand(f"[NAME|DIR|{NONE}]", "goes on with an adapter, or without one", _adapter),
    "/system": SlashCommand(f"[TEXT|{NONE}]", "sets the system prompt, or shows it", _system),
    "/set": SlashCommand("[NAME VALUE]", f"sets {', '.join(SETTINGS)}, or shows them", _set),
    "/retry": SlashCommand("", "writes the last answer again", lambda chat, *_: chat.conversation.answer_again()),
    "/reset": SlashCommand(
        "", "forgets all turns; the system prompt stays", lambda chat, *_: chat.conversation.reset()
    ),
    "/save": SlashCommand("FILE", "writes the conversation to a new file", _save),
    "/save!": SlashCommand("FILE", "the same, over one that is there", partial(_save, overwrite=True)),
    "/load": SlashCommand("FILE", "goes on with a conversation that was saved", _load),
    "/exit": SlashCommand("", "ends the conversation, like Ctrl-D", lambda *_: False),
}
