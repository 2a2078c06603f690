"""The text of tokens as they come: whole characters, words joined as in the whole text, and no stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_CONTEXT = 6  # tokens of the prompt, which decide whether the first new token begins with a space
_HALF = "\N{REPLACEMENT CHARACTER}"  # stands for the bytes of an incomplete character
_single_texts: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, bool], str]] = WeakKeyDictionary()
"""The texts of single tokens, by token id and whether special tokens have text.

Most tokens are decoded behind a single token, whose text would be decoded each time.
"""


class TextStream:
    """The text of token ids that come one by one. Special tokens have no text, unless ``with_special`` is set.

    The returned pieces, joined, are the text after ``context``. A token that ends inside a character is held until
    that character is complete.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = (), *, with_special: bool = False
    ) -> None:
        """Begin after ``context``, which is the prompt; only its last tokens count."""
        self._tokenizer, self._with_special = tokenizer, with_special
        self._single = _single_texts.setdefault(tokenizer, {})
        self._ids = list(context[-_CONTEXT:])
        self._num_read = len(self._ids)  # how many have been returned as text; the rest is held

    def put(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._held()
        if not text or text.endswith(_HALF):
            return ""
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        return text

    def end(self) -> str:
        """Return the held text, which may end with a replacement character."""
        text = self._held()
        self._num_read = len(self._ids)
        return text

    def _held(self) -> str:
        # Tokens are decoded behind the ones before, which decide about spaces. A character may begin in the prompt.
        before = self._before().rstrip(_HALF)
        return self._decode(self._ids)[len(before) :]

    def _before(self) -> str:
        """Return the text of the tokens that have been read and decide how the held ones begin."""
        if self._num_read != 1:
            return self._decode(self._ids[: self._num_read])
        key = self._ids[0], self._with_special
        if (text := self._single.get(key)) is None:
            text = self._single[key] = self._decode(self._ids[:1])
        return text

    def _decode(self, ids: list[int]) -> str:
        without = not self._with_special
        return str(self._tokenizer.decode(ids, skip_special_tokens=without, clean_up_tokenization_spaces=False))


class StopStrings:
    """A filter that passes text on up to the first stop string.

    Attributes:
        found: the stop string that has come; empty if none has. The stop string and later text are not passed on.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""  # perhaps the beginning of a stop string
        self.found = ""

    def put(self, text: str) -> str:
        text = self._held + text
        places = [(place, string) for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            end, self.found = min(places)
            self._held = ""
            return text[:end]
        num_held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """Return the text that was held as a possible beginning of a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of the text are an incomplete beginning of the string."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
