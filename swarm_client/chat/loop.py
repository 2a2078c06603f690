"""Turns are answered and commands carried out, until the input ends."""

from __future__ import annotations

from typing import Protocol

from swarm_client.chat.chat import Chat
from swarm_client.chat.commands import carry_out
from swarm_protocol.errors import SwarmError
from swarm_protocol.process.logs import say_error


class Reader(Protocol):
    """Where turns come from, and where else than answers something is said."""

    def read(self) -> str:
        """Raises EOFError at the end, and KeyboardInterrupt."""

    def say(self, text: str) -> None: ...


def run(chat: Chat, reader: Reader, *, interactive: bool) -> None:
    """Until the input ends.

    Args:
        interactive: somebody types it. What goes wrong is said, and the conversation goes on; Ctrl-C stops an answer.
            Otherwise both end it.
    """
    going_on = True
    while going_on:
        try:
            text = reader.read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            reader.say("/exit or Ctrl-D ends the conversation")
            continue
        try:
            going_on = carry_out(chat, text, reader.say)
        except KeyboardInterrupt:
            if not interactive:
                raise
            reader.say("stopped")
        except (SwarmError, ValueError) as error:
            if not interactive:
                raise
            say_error(error)
