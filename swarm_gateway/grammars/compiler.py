"""Grammars that an answer must follow, compiled by ``llguidance``: JSON, a JSON schema, or rules that combine them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessor

from swarm_gateway.grammars import schema_check
from swarm_gateway.limits.admission import ApiError
from swarm_protocol.failures import any_error_as

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_CHARS = 1 << 16  # of schemas; their parts may be nested as deep as this allows
_STACK_BYTES = 64 << 20  # for compiling a grammar; the check passes only grammars for which 8 MiB are enough
_CHECK_S = 30.0  # of wall-clock time, while the check's own limit is in CPU time
_WHITESPACE = r"[ \n\t]{0,20}"  # between parts of JSON; without a limit, a model might write only whitespace
_SHOWN = 300  # characters of a reason
T = TypeVar("T")


class Grammar:
    """A grammar that is compiled for the tokens of one model."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int]) -> None:
        """Keep a matcher; ``end_ids`` are the tokens that end an answer, allowed where the grammar may end."""
        self._matcher, self.end_ids = matcher, tuple(end_ids)

    def processor(self, num_prompt: int) -> LogitsProcessor:
        """Return a logits processor for one generation whose prompt has ``num_prompt`` tokens."""
        return _Constrained(self._matcher.deep_copy(), num_prompt)


class GrammarCompiler:
    """The compiler of one model's grammars, for any thread. The first use is slow, as it prepares the tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Keep the model's values; ``tokenizer`` is a tokenizer of transformers."""
        self._tokenizer, self._vocab_size, self.end_ids = tokenizer, vocab_size, list(end_ids)
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    def literal(self, text: str) -> str:
        """Return ``text`` for a rule: the added token of this name, which plain text never gives, or a string."""
        token_id = self._tokenizer.get_added_vocab().get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def compile(self, rules: str, schemas: Mapping[str, Mapping[str, Any]], param: str) -> Grammar:
        """Return the grammar of ``rules`` and ``schemas``.

        Args:
            rules: rules in Lark's syntax; ``start`` is the answer.

        Raises:
            ApiError: the grammar is invalid, too large, or not supported with this model.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(400, f"{param} needs a package that this server lacks: pip install llguidance", param=param)
        if not self.end_ids:
            raise ApiError(400, f"{param} is not supported with this model: it has no token that ends", param=param)
        lines: list[str] = []
        num_chars = len(rules)
        for name, own in schemas.items():
            guided = {**own, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
            lines.append(f"{name}: %json {json.dumps(guided)}")
            num_chars += len(lines[-1]) + 1
            if num_chars > _MOST_CHARS:  # before the next one, as the same definitions may be in each of thousands
                break
        if num_chars > _MOST_CHARS:
            message = f"{param} has at least {num_chars} characters: expected at most {_MOST_CHARS}"
            raise ApiError(400, message, param=param)
        values = "\n".join(lines)
        try:
            reason = _why_none(f"start: {' '.join(schemas)}\n{values}") if schemas else ""
        except subprocess.TimeoutExpired:
            raise _refused(param, "it takes too long to compile") from None
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
        if first.is_stopped():  # before the first token
            raise _refused(param, "nothing satisfies it")
        return Grammar(matcher, self.end_ids)

    def _tokens(self, param: str) -> LLTokenizer:
        with self._making:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                def refusal(error: Exception) -> ApiError:
                    name = type(self._tokenizer).__name__
                    message = f"{param} is not supported with this model, whose tokenizer is {name}: {error}"
                    return ApiError(400, message, param=param, code="unsupported_parameter")

                with any_error_as(refusal):
                    self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self.end_ids)
            return self._made


def text_until(name: str, end: str) -> str:
    """Return the rule ``name``: any text, and then ``end``, which is a result of ``GrammarCompiler.literal``."""
    if end.startswith("<["):  # a token, which is never part of the text
        return f"{name}: /(.|\\n)*/ {end}"
    return f"{name}[suffix={end}]: /(.|\\n)*/"


def _refused(param: str, reason: str) -> ApiError:
    said = re.split(r"\n\s*\d+ \| ", reason)[0].rpartition("failed to compile JSON schema: ")[2]  # without the grammar
    return ApiError(400, f"{param}: {' '.join(said.split())[:_SHOWN]}", param=param, code="invalid_value")


@lru_cache(256)
def _why_none(lark: str) -> str:
    """Return why ``lark`` is not a valid grammar; an empty string if it is valid.

    Raise TimeoutExpired if the check has had no time to end: a busy machine says nothing about later tries, so this
    answer is not kept.
    """
    command = [sys.executable, "-P", str(Path(schema_check.__file__))]
    done = subprocess.run(command, input=lark.encode(), capture_output=True, timeout=_CHECK_S)
    if done.returncode:
        return "it is nested too deeply, or takes too long to compile"
    return done.stdout.decode(errors="replace").strip()


def _with_large_stack(call: Callable[[], T]) -> T:
    """Return what ``call`` returns in a thread with a stack of ``_STACK_BYTES``, or raise what it raises."""
    with ThreadPoolExecutor(1, "grammar") as thread:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                working = thread.submit(call)  # which starts the thread
            finally:
                threading.stack_size(before)
        return working.result()


_stack_size = threading.Lock()  # the size for new threads is a setting of the whole process


class _Constrained(LogitsProcessor):
    """A logits processor of one generation that allows only tokens with which the grammar continues or may end."""

    def __init__(self, matcher: LLMatcher, num_prompt: int) -> None:
        self._matcher, self._num_seen = matcher, num_prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return ``scores`` [1, vocabulary] with -inf for forbidden tokens. Raise ValueError if no token is left, or if
        the grammar has become too complex."""
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
