"""Answers in OpenAI's shapes: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm_gateway.answers.answer_reader import ToolCall
from swarm_gateway.generation.generating import Delta, Happened, Item, QueuedGenerations, SaidToken, joined
from swarm_gateway.web.servers import described

_LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


class TokenTexts:
    """The texts of single tokens, by token id, including a leading space."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Many tokenizers drop the leading space of the first token that they decode, so each one follows this text.
        self._before = list(tokenizer("a", add_special_tokens=False).input_ids)
        self._num_before = len(self._decode(self._before))

    def __getitem__(self, token_id: int) -> str:
        return self._decode([*self._before, token_id])[self._num_before :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def usage(work: QueuedGenerations) -> dict[str, Any]:
    """Return the numbers of tokens so far."""
    num_prompt, num_generated, num_reasoning = work.num_prompt, work.num_generated, work.num_reasoning
    total = num_prompt + num_generated
    found = {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": total}
    return found | ({"completion_tokens_details": {"reasoning_tokens": num_reasoning}} if num_reasoning else {})


class _Format:
    """The format of one answer: a subclass gives the shapes of the chat or the completion endpoint."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, model: str, texts: TokenTexts | None) -> None:
        """Begin an answer; ``texts`` is None if logprobs were not asked for."""
        self._id, self._created, self._model = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self.texts = texts

    def whole(self, deltas: Sequence[Delta], num_choices: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
        by_choice: list[list[Delta]] = [[] for _ in range(num_choices)]
        for delta in deltas:
            by_choice[delta.choice].append(delta)
        choices = list(map(self._whole, map(joined, by_choice)))
        return self._head(self.whole_kind) | {"choices": choices, "usage": numbers}

    def chunk(self, item: Item) -> dict[str, Any]:
        head = self._head(self.chunk_kind)
        if isinstance(item, Happened):
            return head | {"choices": [], "swarm": {"index": item.choice} | described(item.what)}
        return head | {"choices": [self._part(item)]}

    def last_chunk(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return self._head(self.chunk_kind) | {"choices": [], "usage": numbers}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(_Format):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, texts: TokenTexts | None) -> None:
        super().__init__(model, texts)
        self._begun: set[int] = set()  # choices whose role has been sent
        self._num_calls: Counter[int] = Counter()  # of each choice

    def _whole(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.text if delta.text.strip() else None
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return self._choice(delta) | {"message": message}

    def _part(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said = {"role": "assistant", "content": delta.text}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            first = self._num_calls[delta.choice]
            said["tool_calls"] = [_call(call) | {"index": index} for index, call in enumerate(delta.calls, first)]
            self._num_calls[delta.choice] += len(delta.calls)
        return self._choice(delta) | {"delta": said}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.texts is None else {"content": list(map(self._logprob, delta.tokens)), "refusal": None}
        return {"index": delta.choice, "finish_reason": delta.finish, "logprobs": logprobs}

    def _logprob(self, said: SaidToken) -> dict[str, Any]:
        top = [self._named(token_id, logprob) for token_id, logprob in said.token.top]
        return self._named(said.token.id, said.token.logprob) | {"top_logprobs": top}

    def _named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        assert self.texts is not None and logprob is not None  # logprobs were asked for
        text = self.texts[token_id]
        is_part = "\N{REPLACEMENT CHARACTER}" in text  # part of a character, so its bytes are unknown
        return {"token": text, "logprob": _finite(logprob), "bytes": None if is_part else list(text.encode())}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionFormat(_Format):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _whole(self, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.texts is None else self._logprobs(delta.tokens, self.texts)
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    _part = _whole

    @staticmethod
    def _logprobs(tokens: Iterable[SaidToken], texts: TokenTexts) -> dict[str, Any]:
        """Return the logprobs in OpenAI's shape. The first token of a prompt has null.

        ``top_logprobs`` includes the token itself, as with OpenAI, so that the list may be longer by one.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for said in tokens:
            token = said.token
            own = None if token.logprob is None else {texts[token.id]: _finite(token.logprob)}
            top = {texts[token_id]: _finite(logprob) for token_id, logprob in token.top}
            found["tokens"].append(texts[token.id])
            found["token_logprobs"].append(None if token.logprob is None else _finite(token.logprob))
            found["top_logprobs"].append(None if own is None else top | own)
            found["text_offset"].append(said.offset)
        return found
