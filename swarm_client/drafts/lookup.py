"""Prompt lookup: guesses are the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_client.speculation.draft import Draft, DraftSession, Guesses, Ranking
from swarm_client.speculation.policy import DraftPlan

LONGEST = 4  # the most tokens that are looked up
SHORTEST = 2  # one token alone says too little
_MOST_PLACES = 8  # the most remembered places of the same tokens


class LookupDraft(Draft):
    """A draft that needs no model and almost no time (Saxena, "Prompt Lookup Decoding", 2023)."""

    name = "lookup"
    acceptance = 0.4
    most_rows = 3

    def begin(self) -> LookupSession:
        return LookupSession()


class LookupSession(DraftSession):
    """The tokens of one text, and the places of the last few tokens in it."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # where the text continues after them; the latest last
        self._num_indexed = 0  # tokens whose places are indexed

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        self._ids.extend(token_ids)

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        """Return lines with different first tokens, first those after the longest matches, and of these the latest."""
        self._index()
        lines: list[list[int]] = []
        for length in range(min(LONGEST, len(self._ids)), SHORTEST - 1, -1):
            for place in reversed(self._places.get(tuple(self._ids[-length:]), ())):
                line = self._ids[place : place + plan.length]
                if len(lines) < plan.num_rows and all(line[0] != other[0] for other in lines):
                    lines.append(line)
        if not lines or not plan.length:
            return Guesses.none()
        longest = max(map(len, lines))
        # Lines have one length, so shorter ones repeat their last token as further guesses.
        padded = [[*line, *[line[-1]] * (longest - len(line))] for line in lines]
        return Guesses(torch.tensor(padded))

    def _index(self) -> None:
        """Index the new tokens. This happens only before a guess, because among many generations nothing is guessed."""
        for place in range(self._num_indexed, len(self._ids)):
            for length in range(SHORTEST, min(LONGEST, place) + 1):
                places = self._places.setdefault(tuple(self._ids[place - length : place]), [])
                places.append(place)
                del places[:-_MOST_PLACES]
        self._num_indexed = len(self._ids)
