"""The translation of a request's fields into requests to the generation loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor

from swarm_client.batching.config import with_values
from swarm_client.batching.request import Request
from swarm_client.generation.templates import first_tokens
from swarm_gateway.generation.conversation import conversation_text, grammar_of
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.models import ServedModel, end_ids


def prompts_of(
    asked: ChatRequest | CompletionRequest, model: ServedModel
) -> list[tuple[list[int], Mapping[str, torch.Tensor]]]:
    """Return the token ids of each prompt, and its pictures.

    Raise ApiError if a prompt is empty, or has ids outside the vocabulary.
    """
    prompts = [_conversation(asked, model)] if isinstance(asked, ChatRequest) else _texts(asked.prompt, model)
    for prompt, _ in prompts:
        if not prompt:
            raise ApiError(400, "the prompt has no tokens: expected some text", param="prompt")
        if any(not 0 <= token < model.vocab_size for token in prompt):
            raise ApiError(400, f"the model's token ids are below {model.vocab_size}", param="prompt")
    return prompts


def _conversation(asked: ChatRequest, model: ServedModel) -> tuple[list[int], Mapping[str, torch.Tensor]]:
    """Return the token ids of a conversation, and its pictures."""
    urls = [url for message in asked.messages for url in message.pictures]
    if urls and model.pictures is None:
        raise ApiError(400, "this model does not see: expected messages without pictures", param="messages")
    text = conversation_text(asked, model.tokenizer)
    model.check_length(text, "messages")
    if urls and model.pictures is not None:
        return model.pictures.prompt(text, urls)
    return first_tokens(model.tokenizer, text), {}


def _texts(
    prompts: Sequence[str | list[int]], model: ServedModel
) -> list[tuple[list[int], Mapping[str, torch.Tensor]]]:
    """Return the token ids of texts to complete, which may be given as token ids; there are no pictures."""
    for prompt in prompts:
        if isinstance(prompt, str):
            model.check_length(prompt, "prompt")
    return [(list(model.tokenizer(each).input_ids) if isinstance(each, str) else each, {}) for each in prompts]


def requests_of(asked: ChatRequest | CompletionRequest, model: ServedModel) -> list[Request]:
    """Return ``n`` requests for each prompt. Raise ApiError if the model cannot do what the request asks for."""
    bias = {int(token): value for token, value in asked.logit_bias.items()}
    model.check_tokens(bias, "logit_bias")
    model.check_tokens(asked.stop_token_ids, "stop_token_ids")
    prompts = prompts_of(asked, model)
    # A chat has one prompt.
    grammar = grammar_of(asked, model, prompts[0][0]) if isinstance(asked, ChatRequest) else None
    requests: list[Request] = []
    for prompt, pictures in prompts:
        values: dict[str, Any] = {"max_new_tokens": _num_tokens(asked, model, len(prompt))}
        if grammar is not None:
            values["eos_token_id"] = [*grammar.end_ids, *asked.stop_token_ids]
        config = with_values(generation_config(asked, model.generation_config), **values)
        processors = _processors(asked, bias, len(prompt))
        token_ids = tuple(prompt)
        requests += [
            Request(
                prompt=token_ids,
                config=config,
                seed=asked.seed_of(len(requests) + choice),
                processors=(*processors, *([] if grammar is None else [grammar.processor(len(prompt))])),
                num_logprobs=asked.num_logprobs,
                scores_prompt=asked.num_logprobs is not None and isinstance(asked, CompletionRequest) and asked.echo,
                with_servers=asked.streamed.include_servers,
                is_background=asked.is_background,
                pictures=pictures,
            )
            for choice in range(asked.n)
        ]
    return requests


def _processors(
    asked: ChatRequest | CompletionRequest, bias: Mapping[int, float], num_prompt: int
) -> list[LogitsProcessor]:
    """Return the logits processors for the penalties and the bias, which all choices of a prompt share."""
    processors: list[LogitsProcessor] = []
    if asked.presence_penalty or asked.frequency_penalty:
        processors.append(Penalties(num_prompt, asked.presence_penalty, asked.frequency_penalty))
    if bias:
        processors.append(LogitBias(bias))
    return processors


def echoes_of(asked: ChatRequest | CompletionRequest, model: ServedModel) -> list[str]:
    """Return the text with which the answer to each of ``requests_of`` begins; an empty list without echo."""
    if isinstance(asked, ChatRequest) or not asked.echo:
        return []
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    texts = [each if isinstance(each, str) else str(model.tokenizer.decode(each, **options)) for each in asked.prompt]
    return [text for text in texts for _ in range(asked.n)]


def _num_tokens(asked: ChatRequest | CompletionRequest, model: ServedModel, num_prompt: int) -> int:
    most = asked.most_tokens
    if model.max_positions is None:
        return asked.DEFAULT_TOKENS if most is None else most
    left = model.max_positions - num_prompt
    if most is not None and asked.TAKES_FEWER:
        most = min(most, max(1, left))
    if left < (1 if most is None else most):
        wanted = f", and {most} more are asked for" if most else ""
        raise ApiError(
            400,
            f"the model has {model.max_positions} positions: the prompt has {num_prompt} tokens{wanted}",
            param="messages" if isinstance(asked, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    return min(asked.DEFAULT_TOKENS, left) if most is None else most


def generation_config(asked: ChatRequest | CompletionRequest, own: GenerationConfig) -> GenerationConfig:
    """Return ``own`` changed by the request. Where neither sets a value, sampling uses the model's own probabilities.

    A temperature of 0 takes the likeliest token. No temperature does the same if ``own`` says not to sample.
    """
    values: dict[str, Any] = {}
    repetition_penalty = asked.repetition_penalty or asked.repeat_penalty
    if repetition_penalty is not None:
        values["repetition_penalty"] = repetition_penalty
    if asked.ignore_eos or asked.stop_token_ids:
        values["eos_token_id"] = [*([] if asked.ignore_eos else end_ids(own)), *asked.stop_token_ids]
    if asked.temperature == 0 or (asked.temperature is None and own.do_sample is False):
        return with_values(own, **values, do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    return with_values(
        own,
        **values,
        do_sample=True,
        temperature=_first(asked.temperature, own.temperature, 1.0),
        top_p=_first(asked.top_p, own.top_p, 1.0),
        top_k=max(0, int(_first(asked.top_k, own.top_k, 0))),  # -1 means all tokens too, as with vLLM
        min_p=asked.min_p if asked.min_p is not None else own.min_p,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


class Penalties(LogitsProcessor):
    """OpenAI's penalties: a token generated ``c > 0`` times gets the logit ``logit - c * frequency - presence``."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        generated = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - counts * self._frequency - (counts > 0) * self._presence  # type: ignore[return-value]


class LogitBias(LogitsProcessor):
    """A logits processor that adds a bias to the logits of some token ids."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()  # type: ignore[assignment]
        scores[:, self._ids.to(scores.device)] += self._values.to(scores)
        return scores
