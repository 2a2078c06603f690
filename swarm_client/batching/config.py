"""The check of a request's settings for the choice of tokens, before the generation loop takes the request."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from swarm_client.batching.request import Request
from swarm_protocol.errors import RequestRejected

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_NOT_HERE = {  # settings that the loop does not know, with the values at which they have no effect
    "stop_strings": (None,),
    "max_time": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
}


def not_batched(config: GenerationConfig) -> str | None:
    """Return the name of a setting that the loop does not know; None if there is none."""
    return next((name for name, neutral in _NOT_HERE.items() if getattr(config, name, None) not in neutral), None)


def checked_config(model: RemoteModelMixin, request: Request) -> GenerationConfig:
    """Return the request's config, with the model's values where it sets none, as ``generate`` prepares it.

    Raise RequestRejected if the loop cannot do what the request asks for.
    """
    stock: Any = model
    if not request.prompt:
        raise RequestRejected("the prompt is empty: expected at least one token")
    writes_nothing = request.config.max_new_tokens == 0
    given = with_values(request.config, **({"max_new_tokens": 1} if writes_nothing else {}))  # ``generate`` knows no 0
    config: Any = stock._prepare_generation_config(given)[0]
    _require_batched(config)
    num_new = 0 if writes_nothing else config.max_new_tokens
    total, limit = len(request.prompt) + num_new, model.blocks.max_positions
    if limit is not None and total > limit:
        raise RequestRejected(
            f"prompt and new tokens need {total} positions, but the model has {limit}: shorten the prompt or ask "
            "for fewer new tokens"
        )
    vocabulary = stock.get_input_embeddings().num_embeddings
    if not all(0 <= token_id < vocabulary for token_id in request.prompt):
        raise RequestRejected(f"token ids must be from 0 to {vocabulary - 1}")
    values: dict[str, Any] = {"max_new_tokens": num_new, "max_length": total}
    if config.min_new_tokens is not None:
        values["min_length"] = len(request.prompt) + config.min_new_tokens
    values["eos_token_id"] = config.eos_token_id or None  # from an empty list no padding token can be taken
    checked = with_values(config, **values)
    stock._prepare_special_tokens(checked, True, device="cpu")
    return checked


def with_values(config: GenerationConfig, **values: Any) -> GenerationConfig:
    """Return a copy of ``config`` with these values, as they are: ``GenerationConfig.update`` refuses 0 new tokens."""
    copied = copy.deepcopy(config)
    vars(copied).update(values)
    return copied


def _require_batched(config: Any) -> None:
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise RequestRejected("beams and assistants are not batched: expected greedy search or sampling")
    if config.num_return_sequences not in (None, 1):
        raise RequestRejected("num_return_sequences is not batched: submit one request for each")
    if (name := not_batched(config)) is not None:
        raise RequestRejected(f"{name} is not batched: call generate")
    if config.max_new_tokens is None or config.max_new_tokens < 1:
        raise RequestRejected(f"max_new_tokens is {config.max_new_tokens}: expected at least 0")


def generator_of(request: Request) -> torch.Generator:
    """Return the generator of random numbers that samples the request's tokens."""
    if request.generator is not None:
        return request.generator
    generator = torch.Generator()
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    return generator
