"""Error feedback: a codec's loss is added to the next vector (Karimireddy et al., 2019, Algorithm 1: EF-SGD)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_training.compression.codecs import Codec


class ChunkPlace(NamedTuple):
    """The place of a chunk: it begins at element ``start`` of a vector of ``length`` elements. ``what``: the name of
    the vector; the corresponding vectors of later rounds have the same name."""

    what: str
    start: int
    length: int


class ErrorFeedback:
    """An encoder that adds to each chunk the error of the same elements: what earlier rounds have lost of them.

    Errors change in ``commit`` alone, for the chunks that were counted. A chunk that is encoded again in the same
    round, for another peer, starts from the same errors. Errors belong to elements, so rounds may cut a vector
    differently.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._errors: dict[str, Tensor] = {}  # by the vector's name: [length]
        self._pending: dict[ChunkPlace, Tensor] = {}  # the errors after this round, if it counts

    def encode(self, place: ChunkPlace, chunk: Tensor) -> bytes:
        """Encode a chunk, [n] float32, plus its error. Errors that are not finite are dropped."""
        corrected = self._corrected(place, chunk)
        data = self.codec.encode(corrected)
        lost = corrected.detach().cpu() - self.codec.decode(data, corrected.numel())
        self._pending[place] = torch.where(lost.isfinite(), lost, 0.0)
        return data

    def whole(self, place: ChunkPlace, chunk: Tensor) -> Tensor:
        """Return a chunk, [n] float32, plus its error, for a sum that takes it without encoding: nothing is lost."""
        corrected = self._corrected(place, chunk)
        if corrected is not chunk:
            self._pending[place] = torch.zeros(len(chunk), dtype=chunk.dtype)  # the sum has taken the whole error
        else:
            self._pending.pop(place, None)  # it may have been encoded before, for another peer
        return corrected

    def commit(self, counted: Collection[ChunkPlace]) -> None:
        """Record that the round has succeeded. Its losses replace the errors of the chunks in ``counted``. The errors
        of all other chunks stay."""
        for place, lost in self._pending.items():
            if place not in counted:
                continue
            errors = self._errors.get(place.what)
            if errors is None or len(errors) != place.length:
                errors = self._errors[place.what] = torch.zeros(place.length, dtype=lost.dtype)
            errors[place.start : place.start + len(lost)] = lost
        self._pending = {}

    def forget(self) -> None:
        """Discard the losses of all rounds."""
        self._errors, self._pending = {}, {}

    def rollback(self) -> None:
        """Discard the losses of this round, because it has failed."""
        self._pending = {}

    def _corrected(self, place: ChunkPlace, chunk: Tensor) -> Tensor:
        errors = self._errors.get(place.what)
        if errors is None or len(errors) != place.length:
            return chunk
        return chunk + errors[place.start : place.start + len(chunk)].to(chunk.device)
