"""Text of tokens as they come: whole characters, words joined as in the whole text, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_CONTEXT = 6  # tokens of the prompt: whether the first new one begins with a space depends on what is before it
_HALF = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no whole character yet


class TextStream:
    """The text of token ids; special tokens have none, unless it is wanted.

    What is returned, put together, is the text after ``context``. A token whose text is not yet certain, since it ends
    in the middle of a character, is held until it is.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = (), *, with_special: bool = False
    ) -> None:
        """``context``: the prompt, of which the last tokens count."""
        self._tokenizer, self._with_special = tokenizer, with_special
        self._ids = list(context[-_CONTEXT:])
        self._num_read = len(self._ids)  # how many of them have been returned as text; the rest is held

    def put(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._held()
        if not text or text.endswith(_HALF):
            return ""
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        return text

    def end(self) -> str:
        """What is held, though it may end with a replacement character."""
        text = self._held()
        self._num_read = len(self._ids)
        return text

    def _held(self) -> str:
        before = self._decode(self._ids[: self._num_read]).rstrip(_HALF)  # of a character that was begun in the prompt
        return self._decode(self._ids)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        without = not self._with_special
        return str(self._tokenizer.decode(ids, skip_special_tokens=without, clean_up_tokenization_spaces=False))


class StopStrings:
    """Passes text on up to the first of some strings.

    Attributes:
        found: one has come. Nothing of it, and nothing after it, is passed on.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""  # the beginning of a stop string, perhaps
        self.found = False

    def put(self, text: str) -> str:
        text = self._held + text
        places = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        num_held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """What was held for the beginning of a stop string, and was not."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of the text are a beginning of the string, which may go on."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
