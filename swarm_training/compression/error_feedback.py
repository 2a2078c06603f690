"""What a codec loses is added to the next vector (Karimireddy et al., 2019, Algorithm 1: EF-SGD)."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from swarm_training.compression.codecs import Codec


class ErrorFeedback:
    """Encodes vectors together with what was lost of their predecessors.

    A vector's key says whose successor it is, such as its place in the gradient. The memory changes in ``commit``
    alone: a key that is encoded again in the same round, for another peer, starts from the same errors.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._errors: dict[Hashable, Tensor] = {}
        self._pending: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, vector: Tensor) -> bytes:
        """vector: [n], float32. An error of another length than n is forgotten; so is one that is not finite."""
        error = self._errors.get(key)
        corrected = vector if error is None or error.shape != vector.shape else vector + error.to(vector.device)
        data = self.codec.encode(corrected)
        lost = corrected.detach().cpu() - self.codec.decode(data, corrected.numel())
        self._pending[key] = torch.where(lost.isfinite(), lost, 0.0)
        return data

    def commit(self) -> None:
        """The round succeeded: what was lost in it is remembered."""
        self._errors |= self._pending
        self._pending = {}

    def forget(self) -> None:
        """Nothing of any round is remembered."""
        self._errors, self._pending = {}, {}

    def rollback(self) -> None:
        """The round failed: nothing of it is remembered."""
        self._pending = {}
