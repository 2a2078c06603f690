"""A report of what quantising did to a block, and what it left unchanged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

PLURALS = {"bias": "biases", "other": "others", "experts": "fused experts"}


@dataclass(frozen=True)
class Left:
    """Parameters of one module that stay as they were. ``name`` is the module's path in the block."""

    kind: str  # "linear", "experts", "router", "index", "norm", "bias" or "other"
    name: str
    num_params: int
    size_bytes: int


@dataclass(frozen=True)
class Report:
    """The counts for one block, or for several when summed; every parameter is either quantised or in ``left``.

    ``quantised_bytes`` is the size of the quantised weights with their scales and padding.
    """

    method: str
    num_linears: int = 0
    num_expert_weights: int = 0
    quantised_params: int = 0
    quantised_bytes: int = 0
    left: tuple[Left, ...] = ()

    def __add__(self, other: Report) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        if self.method != other.method:
            raise ValueError(f"a report of {self.method} and one of {other.method} cannot be added")
        return Report(
            self.method,
            self.num_linears + other.num_linears,
            self.num_expert_weights + other.num_expert_weights,
            self.quantised_params + other.quantised_params,
            self.quantised_bytes + other.quantised_bytes,
            self.left + other.left,
        )

    @property
    def left_params(self) -> int:
        return sum(part.num_params for part in self.left)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of all weights, quantised or not."""
        return self.quantised_bytes + sum(part.size_bytes for part in self.left)

    def __str__(self) -> str:
        done = _count(self.num_linears, "linear weight")
        if self.num_expert_weights:
            done += f", {_count(self.num_expert_weights, 'expert weight')}"
        size = _amount(self.quantised_params) + " parameters"
        if self.quantised_params:
            size += f", {self.quantised_bytes / self.quantised_params:.2f} bytes each"
        kinds = Counter(part.kind for part in self.left)
        left = ", ".join(_count(number, kind) for kind, number in kinds.items()) or "nothing"
        return f"{self.method}: {done} quantised ({size}); left as they are: {left} ({_amount(self.left_params)})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else PLURALS.get(noun, noun + 's')}"


def _amount(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)
