"""Grammars that an answer must follow, by ``llguidance``: JSON, a JSON schema, or what is put together of these."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessor

from swarm_client.gateway.admission import ApiError
from swarm_client.gateway.grammars import schema_check

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_CHARS = 1 << 16  # of schemas; their parts may be nested as deep as that allows
_STACK_BYTES = 64 << 20  # for compiling it; 8 MiB, which the check has, are enough for all that passes
_CHECK_S = 30.0  # of wall-clock time: its own limit is of CPU time
_WHITESPACE = r"[ \n\t]{0,20}"  # between parts of JSON: without an end, a model might write nothing else
_SHOWN = 300  # characters of a reason
T = TypeVar("T")


class Grammar:
    """Compiled for the tokens of one model."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int]) -> None:
        """``end_ids``: the tokens that end an answer, which are allowed where the grammar may end."""
        self._matcher, self.end_ids = matcher, tuple(end_ids)

    def processor(self, num_prompt: int) -> LogitsProcessor:
        """Of one generation, after so many tokens."""
        return _Constrained(self._matcher.deep_copy(), num_prompt)


class GrammarCompiler:
    """Of one model. From any thread; what it knows of the tokens is made when it is first needed, which takes a while.

    Attributes:
        end_ids: see ``Grammar``.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        """``tokenizer``: of transformers."""
        self._tokenizer, self._vocab_size, self.end_ids = tokenizer, vocab_size, list(end_ids)
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    def literal(self, text: str) -> str:
        """The text in a rule; a token of its own if the tokenizer has one that is called so, which no text is."""
        token_id = self._tokenizer.get_added_vocab().get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def compile(self, rules: str, schemas: Mapping[str, Mapping[str, Any]], param: str) -> Grammar:
        """
        Args:
            rules: in Lark's syntax; ``start`` is the answer.
            schemas: those of JSON, by the names of rules.
            param: the field of the request that asks for it.

        Raises:
            ApiError: it is no grammar, too large, or not supported with this model.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(400, f"{param} needs a package that this server lacks: pip install llguidance", param=param)
        if not self.end_ids:
            raise ApiError(400, f"{param} is not supported with this model: it has no token that ends", param=param)
        values = "\n".join(f"{name}: {_json_rule(schema)}" for name, schema in schemas.items())
        if len(values) > _MOST_CHARS:
            raise ApiError(400, f"{param} has {len(values)} characters: expected at most {_MOST_CHARS}", param=param)
        reason = _why_none(f"start: {' '.join(schemas)}\n{values}")
        if reason:
            raise _refused(param, reason)
        from llguidance import LLMatcher, LLParserLimits

        tokens, limits = self._tokens(param), LLParserLimits(verbose_errors=False)
        lark = f"{rules}\n{values}"
        matcher = _with_large_stack(
            lambda: LLMatcher(tokens, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        )
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_stopped():  # before anything was written
            raise _refused(param, "nothing satisfies it")
        return Grammar(matcher, self.end_ids)

    def _tokens(self, param: str) -> LLTokenizer:
        with self._making:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self.end_ids)
                except Exception as error:  # of Rust, whatever a stranger's tokenizer contains
                    name = type(self._tokenizer).__name__
                    message = f"{param} is not supported with this model, whose tokenizer is {name}: {error}"
                    raise ApiError(400, message, param=param, code="unsupported_parameter") from None
            return self._made


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def _refused(param: str, reason: str) -> ApiError:
    said = re.split(r"\n\s*\d+ \| ", reason)[0].rpartition("failed to compile JSON schema: ")[2]  # without the grammar
    return ApiError(400, f"{param}: {' '.join(said.split())[:_SHOWN]}", param=param, code="invalid_value")


@lru_cache(256)
def _why_none(lark: str) -> str:
    """Why it is no grammar; empty if it is one."""
    command = [sys.executable, "-P", str(Path(schema_check.__file__))]
    try:
        done = subprocess.run(command, input=lark.encode(), capture_output=True, timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        return "it takes too long to compile"
    if done.returncode:
        return "it is nested too deeply, or takes too long to compile"
    return done.stdout.decode(errors="replace").strip()


def _with_large_stack(call: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="grammar")
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]


_stack_size = threading.Lock()  # that of new threads is of the whole process


class _Constrained(LogitsProcessor):
    """Leaves the tokens with which the grammar goes on, or may end. Of one generation."""

    def __init__(self, matcher: LLMatcher, num_prompt: int) -> None:
        self._matcher, self._num_seen = matcher, num_prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Raises ValueError if no token is left, or the grammar has become too complex."""
        new = input_ids[0, self._num_seen :].tolist()
        self._num_seen += len(new)
        self._matcher.consume_tokens(new)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            reason = (self._matcher.get_error().splitlines() or [""])[0]
            raise ValueError(f"the answer cannot follow its grammar any further: {reason[:_SHOWN]}")
        allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little").astype(bool))[: scores.shape[1]]
        found = torch.full_like(scores, -torch.inf)
        found[0, : len(allowed)] = scores[0, : len(allowed)].masked_fill(~allowed.to(scores.device), -torch.inf)
        if bool(found.isneginf().all()):
            raise ValueError("the answer cannot follow its grammar: the model's config forbids all tokens it allows")
        return found  # type: ignore[return-value]
