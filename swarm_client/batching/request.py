"""The requests to the generation loop, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessor

from swarm_client.core.events import Event
from swarm_client.routing.routing import Hop

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """The request for one generation.

    Attributes:
        prompt: the token ids, at least one.
        config: the settings for the choice of tokens, as for ``generate``. ``max_new_tokens`` must be set, and may be
            0. Beams and similar modes are refused.
        seed: the seed of this generation's own random numbers; None means a random seed.
        generator: the generator of random numbers to use instead of an own one.
        processors: logits processors in addition to those of ``config``. Each is called as in ``generate``, with token
            ids [1, length] and scores [1, vocabulary].
        num_logprobs: how many of the likeliest tokens come with each token; 0: only its own logprob; None: nothing.
        scores_prompt: whether the listener gets the same for the prompt's tokens; ``num_logprobs`` must be set.
        with_servers: whether the listener gets the servers and their events, instead of ``on_event`` of the config.
        user: the name of the user, which servers see. Servers share their work for this client equally among its
            users. The name should mean nothing to anybody else.
        is_background: whether nobody waits for the answer: servers compute it while they have nothing else to do, and
            in one turn of eight.
        pictures: the arguments of the model's ``forward``, besides the token ids, that hold the prompt's pictures, as
            the model's processor returns them; empty if there are none.
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
    is_background: bool = False
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """A token.

    Attributes:
        logprob: the natural logarithm of the token's probability by the model's logits, before any processor; None if
            the request does not ask for it.
        top: the ids of the likeliest tokens with their logprobs, the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Servers:
    """The servers that compute a generation from now on: its hops, in the order of their blocks."""

    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Scored:
    """The tokens of a prompt with their logprobs. The first token has none, because nothing predicts it."""

    prompt: tuple[Token, ...]


Item: TypeAlias = Token | Scored | Servers | Event | FinishReason
TokenListener: TypeAlias = Callable[[Item | BaseException], None]
"""A receiver of what a generation says, on threads that it must not block. Any error from it cancels the generation.

Tokens come on the loop's thread. The scored prompt comes before the first one, if the request asks for it. Servers and
events come on the network's thread, if the request asks for them; their order among tokens is kept. The end comes once
and last, but not after ``cancel``: its reason, or an error, which is a ``SwarmError`` or a ValueError.
"""
