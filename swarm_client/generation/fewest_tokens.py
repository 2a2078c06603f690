"""A lower bound on the number of a text's tokens. It is known before the text is tokenized, which takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_SAME_LENGTH = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"}  # normalisers that can be run to get a length
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}  # pre-tokenizers, unless they remove something


class FewestTokens:
    """A lower bound on the number of tokens that a tokenizer makes of a text.

    A tokenizer that keeps the whole text makes at least ``characters / characters of its longest token`` tokens. For a
    tokenizer that drops spaces, or has a token for unknown text, the bound is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) and _keeps_all(backend) else None
        # In a vocabulary of bytes, each byte is written as one character: a token has at most as many characters.
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether the text certainly has more than ``most`` tokens. ``False`` may mean that this is unknown."""
        if self._backend is None or len(text) <= most * self._longest:
            return False
        normalizer = self._backend.normalizer
        return normalizer is None or len(normalizer.normalize_str(text)) > most * self._longest


def _keeps_all(backend: Tokenizer) -> bool:
    """Return whether each character of a normalised text is part of the name of a token."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token also stands for all spaces beside it
        return False
    splits = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    changes = list(_steps(backend.normalizer, "normalizers"))
    of_bytes = _tokens_of_bytes(backend, splits)
    return (
        of_bytes is not None
        and of_bytes <= backend.get_vocab().keys()  # a byte without a token would be lost
        and all(step["type"] in _KEEP_ALL and step.get("behavior") != "Removed" for step in splits)
        and all(step["type"] in _SAME_LENGTH and "Regex" not in step.get("pattern", ()) for step in changes)
    )


def _tokens_of_bytes(backend: Tokenizer, splits: list[dict[str, Any]]) -> set[str] | None:
    """Return the tokens for single bytes, which stand for characters without a token of their own; None if none."""
    if any(step["type"] == "ByteLevel" for step in splits):
        return set(ByteLevel.alphabet())
    if getattr(backend.model, "byte_fallback", False):
        return {f"<0x{byte:02X}>" for byte in range(256)}
    return None


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normaliser or pre-tokenizer, or of each in a sequence; nothing if ``part`` is None."""
    settings = None if part is None else json.loads(part.__getstate__())
    yield from [] if settings is None else settings[name] if settings["type"] == "Sequence" else [settings]
