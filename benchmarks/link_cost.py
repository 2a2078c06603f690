"""The number of bytes that a token costs on the links of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.codecs.sizes import INT8_BLOCK
from swarm_training.stages.compress.layers import BoundaryCompression

_SCALE_BYTES = 4  # a float32 for each block of int8 elements
BYTES_PER_ELEMENT = {
    "fp64": 8.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": (INT8_BLOCK + _SCALE_BYTES) / INT8_BLOCK,  # without the padding of a last block that is not full
}


@dataclass(frozen=True)
class LinkCost:
    """The bytes per token between a stage and the trainer, which stands between all stages.

    For each token, a stage in the middle receives its input twice, and the gradient of its output once. The input comes
    for the forward pass and again for the backward pass, which computes the forward pass again. The stage sends its
    output and the gradient of its input.

    Attributes:
        activation_bytes, gradient_bytes: the bytes of one token at one boundary.
    """

    activation_bytes: float
    gradient_bytes: float

    @classmethod
    def of(cls, layers: str, hidden_size: int, activations: str = "fp32", gradients: str | None = None) -> LinkCost:
        """Return the cost with these layers (``BoundaryCompression``) and codecs; ``gradients`` is by default as
        ``activations``.

        Raises ValueError if there are no such layers or codecs.
        """
        width = BoundaryCompression.parse(layers).width(hidden_size)
        return cls(width * _bytes_per_element(activations), width * _bytes_per_element(gradients or activations))

    @property
    def received_bytes(self) -> float:
        return 2 * self.activation_bytes + self.gradient_bytes

    @property
    def sent_bytes(self) -> float:
        return self.activation_bytes + self.gradient_bytes

    def alone_s(self, bits_per_s: float) -> float:
        """Return the seconds that a token's messages take one after another, at ``bits_per_s`` each way."""
        return 8 * (self.received_bytes + self.sent_bytes) / bits_per_s

    def overlapped_s(self, bits_per_s: float) -> float:
        """Return a token's seconds of link time when many are under way: those of the direction that carries more."""
        return 8 * max(self.received_bytes, self.sent_bytes) / bits_per_s


def _bytes_per_element(codec: str) -> float:
    if codec not in BYTES_PER_ELEMENT:
        raise ValueError(f"codec {codec!r} is unknown: expected one of {', '.join(BYTES_PER_ELEMENT)}")
    return BYTES_PER_ELEMENT[codec]
