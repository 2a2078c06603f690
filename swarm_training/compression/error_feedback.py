"""Error feedback: a codec's loss is added to the next vector (Karimireddy et al., 2019, Algorithm 1: EF-SGD)."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from swarm_training.compression.codecs import Codec


class ErrorFeedback:
    """An encoder that adds to each vector what was lost of its predecessor.

    Vectors with the same key, such as their place in the gradient, succeed each other. The memory changes in ``commit``
    alone: a key that is encoded again in the same round, for another peer, starts from the same errors.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._errors: dict[Hashable, Tensor] = {}
        self._pending: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, vector: Tensor) -> bytes:
        """Encode a vector, [n] float32, plus its error. Errors of another length, or not finite, are dropped."""
        error = self._errors.get(key)
        corrected = vector if error is None or error.shape != vector.shape else vector + error.to(vector.device)
        data = self.codec.encode(corrected)
        lost = corrected.detach().cpu() - self.codec.decode(data, corrected.numel())
        self._pending[key] = torch.where(lost.isfinite(), lost, 0.0)
        return data

    def commit(self) -> None:
        """Remember the losses of the round, which succeeded."""
        self._errors |= self._pending
        self._pending = {}

    def forget(self) -> None:
        """Discard the losses of all rounds."""
        self._errors, self._pending = {}, {}

    def rollback(self) -> None:
        """Discard the losses of the round, which failed."""
        self._pending = {}
