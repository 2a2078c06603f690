"""A conversation with a model, which may be replaced by another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarm_cli.chat.conversation import Conversation
from swarm_client.generation.opening import ModelChoice, require_chain, tokenizer_of
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import FROM_SWARM
from swarm_protocol.failures import Closing, undone_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_client.model.hf_model import RemoteModelMixin


@dataclass(frozen=True)
class ChatModel:
    """An open model that answers; ``close`` leaves its swarm."""

    model: RemoteModelMixin
    tokenizer: PreTrainedTokenizerBase
    close: Callable[[], None]


def open_model(choice: ModelChoice) -> ChatModel:
    """Open the chosen model. Raise SwarmError or ValueError if this fails."""
    model = choice.connect()
    with undone_on_error(model.close):  # because the caller has no model that it could close
        return ChatModel(model, tokenizer_of(model), model.close)


def _named(choice: ModelChoice, opened: ChatModel) -> ModelChoice:
    """Return the choice with the name of the swarm's only model, if the choice left the name open."""
    return replace(choice, model=FROM_SWARM + opened.model.blocks.swarm.model) if choice.model == FROM_SWARM else choice


class Chat(Closing):
    """A conversation with a model that may change. Closing the chat closes the model."""

    def __init__(
        self, choice: ModelChoice, options: TextOptions, open_model: Callable[[ModelChoice], ChatModel] = open_model
    ) -> None:
        """Open the model by ``open_model``. Raise SwarmError or ValueError if this fails."""
        self._open = open_model
        self._opened = open_model(choice)
        self.choice = _named(choice, self._opened)
        self.conversation = Conversation(self._opened.model, self._opened.tokenizer, options)

    def switch(self, choice: ModelChoice) -> None:
        """Continue with another model, once there is a chain of its servers.

        Raises:
            SwarmError, ValueError: the model cannot be used; nothing has changed.
        """
        opened = self._open(choice)
        with undone_on_error(opened.close):  # the chat then stays with its model
            require_chain(opened.model)
        self.conversation.move(opened.model, opened.tokenizer)
        self._opened.close()
        self._opened, self.choice = opened, _named(choice, opened)

    def close(self) -> None:
        self._opened.close()
