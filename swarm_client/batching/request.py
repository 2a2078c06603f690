"""What is asked of the generation loop, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor

from swarm_client.core.events import Event
from swarm_client.routing.routing import Hop

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids, at least one.
        config: how tokens are chosen, as for ``generate``; ``max_new_tokens`` must be set, and may be 0; beams and the
            like are refused.
        seed: of this generation's own generator; None: a random one.
        generator: instead of one of its own.
        processors: of logits, besides those of ``config``, each called as in ``generate`` with token ids [1, length]
            and scores [1, vocabulary].
        num_logprobs: how many of the likeliest tokens are told with each; 0: that of the token itself; None: nothing.
        scores_prompt: the listener is told the same of the prompt's tokens; ``num_logprobs`` must be set.
        with_servers: the listener is told of its servers too; ``on_event`` of the client's config is not.
        user: whom it is for, by a name that servers see: what they compute for this client is shared equally among its
            users. It should mean nothing to anybody else.
    """

    prompt: tuple[int, ...]
    config: GenerationConfig
    seed: int | None = None
    generator: torch.Generator | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    num_logprobs: int | None = None
    scores_prompt: bool = False
    with_servers: bool = False
    user: str = ""


@dataclass(frozen=True)
class Token:
    """Attributes:
    logprob: natural logarithm of its probability by the model's own logits, before any processor; None: not asked for.
    top: the likeliest tokens and theirs, likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Servers:
    """Who computes a generation from now on: its hops, first blocks first."""

    hops: tuple[Hop, ...]


class Listener(Protocol):
    """Is told on the loop's thread, which it must not hold up. If it raises something, the generation is cancelled."""

    def token(self, token: Token) -> None: ...

    def scored(self, prompt: Sequence[Token]) -> None:
        """Take the tokens of the prompt, before the first new one; nothing is known of the prompt's own first token.

        Only if the request asks for it.
        """

    def happened(self, what: Servers | Event) -> None:
        """Only if the request asks for it; on the network's thread. What comes before a token has happened before."""

    def ended(self, reason: FinishReason | BaseException) -> None:
        """Once; after that, nothing more comes. An error: a ``SwarmError``, or a ValueError. Not called after
        ``cancel``."""


class Generation(Protocol):
    """One that is under way."""

    def cancel(self) -> None:
        """Ends it, and frees its room on servers at once. From any thread; nothing happens if it has ended."""


class Batcher(Protocol):
    """What generates."""

    def submit(self, request: Request, listener: Listener) -> Generation:
        """From any thread.

        Raises:
            ValueError: the request is none: an empty prompt, more positions than the model has, an option that is not
                supported.
        """
