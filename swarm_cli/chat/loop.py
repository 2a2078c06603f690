"""The loop that answers turns and runs commands until the input ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_cli.chat.chat import Chat
from swarm_cli.chat.commands import carry_out
from swarm_protocol.errors import SwarmError
from swarm_protocol.process.logs import say_error

if TYPE_CHECKING:
    from swarm_cli.chat.terminal import PipeReader, TerminalReader


def run(chat: Chat, reader: TerminalReader | PipeReader, *, interactive: bool) -> None:
    """Answer turns until the input ends.

    Args:
        interactive: whether a user types. Then errors are printed and the conversation continues, and Ctrl-C stops an
            answer. Otherwise both end the conversation.
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
