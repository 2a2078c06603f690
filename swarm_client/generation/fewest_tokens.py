"""How many tokens a text has at least, which is known before it is made into tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_SAME_LENGTH = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"}  # normalisers of which each text can be asked for
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}  # pre-tokenizers, unless they remove something


class FewestTokens:
    """The least number of tokens that a tokenizer makes of texts.

    A tokenizer that keeps all of a text in its tokens makes at least ``characters / characters of its longest token``.
    Nothing is known of one that drops spaces or has a token for whatever it does not know: then the number is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) and _keeps_all(backend) else None
        # In a vocabulary of bytes, each byte is written as one character: a token has at most as many characters.
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether the text certainly has more tokens than this. ``False`` may mean that it is not known."""
        if self._backend is None or len(text) <= most * self._longest:
            return False
        normalizer = self._backend.normalizer
        return normalizer is None or len(normalizer.normalize_str(text)) > most * self._longest


def _keeps_all(backend: Tokenizer) -> bool:
    """Return whether each character of a normalised text is in a token that names it."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they stand for all spaces beside them, too
        return False
    splits = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    changes = list(_steps(backend.normalizer, "normalizers"))
    if any(step["type"] == "ByteLevel" for step in splits):
        of_bytes = set(ByteLevel.alphabet())
    elif getattr(backend.model, "byte_fallback", False):
        of_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return False
    return (
        of_bytes <= backend.get_vocab().keys()  # a byte without a token is left out
        and all(step["type"] in _KEEP_ALL and step.get("behavior") != "Removed" for step in splits)
        and all(step["type"] in _SAME_LENGTH and "Regex" not in step.get("pattern", ()) for step in changes)
    )


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normaliser or pre-tokenizer, or of each in a sequence of them; none if it is None."""
    settings = None if part is None else json.loads(part.__getstate__())
    yield from [] if settings is None else settings[name] if settings["type"] == "Sequence" else [settings]
