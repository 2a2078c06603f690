"""The options with which commands let a model choose tokens."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_TOKENS = 256  # the most tokens of a turn in a conversation


@dataclass(frozen=True)
class TextOptions:
    """The options for the choice of tokens. Where a field is None, the model's generation config decides.

    Construction raises ValueError if a field is out of its range.
    """

    max_new_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    num_beams: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: expected at least 1")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: expected 0 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected a probability above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected at least 1")
        if self.num_beams < 1:
            raise ValueError(f"num_beams is {self.num_beams}: expected at least 1")

    def as_arguments(self) -> dict[str, object]:
        """Return the keyword arguments for ``generate``."""
        arguments: dict[str, object] = {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams}
        if self.temperature == 0:  # greedy choice, for which transformers takes no temperature
            arguments["do_sample"] = False
            return arguments
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in sampling.items() if value is not None}
        return arguments | given | ({"do_sample": True} if given else {})
