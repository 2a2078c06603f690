"""The ``Span`` type: a half-open range of transformer blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """A range of the blocks ``start, start + 1, …, end - 1``, never empty and never negative.

    Raises:
        ValueError: ``0 <= start < end`` does not hold.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end <= self.start:
            raise ValueError(
                f"blocks {self.start}:{self.end} are no range of blocks: expected START:END with 0 <= START < END, "
                "for example 10:20"
            )

    @classmethod
    def parse(cls, text: str) -> Span:
        """Parse ``"10:20"``; raise ValueError with the expected form otherwise."""
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
        if match is None:
            raise ValueError(f"blocks {text!r} are no range of blocks: expected START:END, for example 10:20")
        return cls(int(match[1]), int(match[2]))

    def within(self, num_blocks: int) -> Span:
        """Return this span if it lies within the model's ``num_blocks`` blocks, else raise ValueError."""
        if self.end > num_blocks:
            raise ValueError(f"blocks {self} are outside the model, which has {num_blocks} blocks (0:{num_blocks})")
        return self

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.end


def runs_without(counts: Sequence[int]) -> tuple[Span, ...]:
    """Return the longest runs of indices whose count is 0, in order, such as the blocks that no server has."""
    runs: list[Span] = []
    for place, count in enumerate(counts):
        if count:
            continue
        if runs and runs[-1].end == place:
            runs[-1] = Span(runs[-1].start, place + 1)
        else:
            runs.append(Span(place, place + 1))
    return tuple(runs)
