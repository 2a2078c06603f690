"""A conversation and the model that answers, which may be changed for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarm_client.chat.conversation import Conversation
from swarm_client.generation.opening import ModelChoice, require_chain, tokenizer_of
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.checkpoints.default_model import FROM_SWARM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_client.model.hf_model import RemoteModelMixin


@dataclass(frozen=True)
class Opened:
    """A model that answers; ``close`` leaves its swarm."""

    model: RemoteModelMixin
    tokenizer: PreTrainedTokenizerBase
    close: Callable[[], None]


def open_model(choice: ModelChoice) -> Opened:
    """Raises SwarmError, ValueError."""
    model = choice.connect()
    try:
        return Opened(model, tokenizer_of(model), model.close)
    except BaseException:
        model.close()
        raise


def _named(choice: ModelChoice, opened: Opened) -> ModelChoice:
    """Return the choice with the name of the swarm's only model, if it left that open."""
    return replace(choice, model=FROM_SWARM + opened.model.blocks.swarm.model) if choice.model == FROM_SWARM else choice


class Chat:
    """A conversation and the model that answers, which may change. A context manager, which closes the model."""

    def __init__(
        self, choice: ModelChoice, options: TextOptions, open_model: Callable[[ModelChoice], Opened] = open_model
    ) -> None:
        """Raises SwarmError, ValueError: the model cannot be had. ``open_model`` stands for the swarm."""
        self._open = open_model
        self._opened = open_model(choice)
        self.choice = _named(choice, self._opened)
        self.conversation = Conversation(self._opened.model, self._opened.tokenizer, options)

    def switch(self, choice: ModelChoice) -> None:
        """The conversation goes on with another model, once there is a chain of its servers; else all is as before.

        Raises:
            SwarmError, ValueError: that cannot be.
        """
        opened = self._open(choice)
        try:
            require_chain(opened.model)
        except BaseException:
            opened.close()
            raise
        self.conversation.move(opened.model, opened.tokenizer)
        self._opened.close()
        self._opened, self.choice = opened, _named(choice, opened)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._opened.close()
