"""The menu that ``swarm`` shows on a terminal if no command is typed. It chooses a command, which is run as usual."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_client.generation.opening import check_model_name
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, SMALL_CHAT_MODEL
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.process.invocation import CONSOLE_SCRIPT

Ask = Callable[[str], str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class MenuQuestion:
    """A question whose answer becomes a flag.

    Attributes:
        check: raises ValueError if the answer is wrong.
        is_required: whether an empty answer is wrong; otherwise it leaves the flag out.
    """

    flag: str
    text: str
    check: Callable[[str], object] = str
    is_required: bool = False

    def words(self, ask: Ask, say: Say) -> list[str]:
        """Ask until the answer is right. Return the flag and its value, or nothing."""
        while True:
            answer = ask(f"{self.text}: ").strip()
            if not answer and not self.is_required:
                return []
            try:
                self.check(answer)
            except ValueError as error:
                say(f"{error}")
            else:
                return [self.flag, answer]


_MODEL = MenuQuestion(
    "--model",
    f"Model: a name on the hub, a directory or GGUF file, {SMALL_CHAT_MODEL} (Enter: {DEFAULT_MODEL})",
    lambda name: check_model_name(name, None),
)
_HOST = MenuQuestion("--host", "Address of this machine, by which others join (Enter: no others)")
_PEER = MenuQuestion("--initial-peers", "Address of a member, /ip4/…/p2p/…", check_peer, is_required=True)


@dataclass(frozen=True)
class MenuEntry:
    """A line of the menu: the command that it runs, and what it asks before."""

    text: str
    command: str
    questions: Sequence[MenuQuestion] = ()


_ENTRIES = (
    MenuEntry("Chat in the browser, with a server on this machine", "up", (_MODEL,)),
    MenuEntry("Share this machine: start a swarm, or more of one", "server", (_MODEL, _HOST)),
    MenuEntry("Join a swarm of other machines", "server", (_PEER,)),
    MenuEntry("Chat in this terminal", "chat", (_MODEL,)),
    MenuEntry("Show the swarm", "status"),
    MenuEntry("Help: all commands", "--help"),
)


def choose(ask: Ask = input, say: Say = print) -> list[str]:
    """Return the words of the command that the user chooses, once they were shown; nothing if the user leaves.

    Raises:
        EOFError: the input has ended. KeyboardInterrupt: Ctrl-C.
    """
    say("What do you want to do?")
    for number, entry in enumerate(_ENTRIES, 1):
        say(f"  {number}  {entry.text} ({CONSOLE_SCRIPT} {entry.command})")
    while (answer := ask(f"1 to {len(_ENTRIES)}, or q to leave: ").strip().lower()) not in ("q", "quit", "exit"):
        if answer.isdecimal() and 1 <= int(answer) <= len(_ENTRIES):
            entry = _ENTRIES[int(answer) - 1]
            words = [entry.command, *(word for question in entry.questions for word in question.words(ask, say))]
            say(f"$ {CONSOLE_SCRIPT} {shlex.join(words)}")
            return words
        say(f"there is no {answer!r} here: expected a number from 1 to {len(_ENTRIES)}, or q")
    return []
