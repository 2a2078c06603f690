"""Tensors in wire form, so that hidden states pass from hop to hop without being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_client.adapters.snapshots import NOTHING, AdapterSnapshot
from swarm_protocol.errors import BadReply, NotFinite, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import (
    Assembler,
    all_finite,
    encode,
    encode_joined,
    encode_mask,
    encode_positions,
    torch_dtype,
)


@dataclass(frozen=True)
class WireTensor:
    """A tensor in wire form, which passes from hop to hop without being decoded."""

    header: pb.Tensor
    parts: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, codec: pb.Codec = pb.RAW) -> WireTensor:
        header, parts = encode(tensor, codec)
        return cls(header, tuple(parts))

    def recoded(self, codec: pb.Codec) -> WireTensor:
        """Return the same tensor in another codec; raise BadReply as ``decode`` does."""
        if self.header.codec == codec:
            return self
        return WireTensor.of(self.decode(self.header.shape, torch_dtype(self.header.dtype)), codec)

    def decode(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor. Raise BadReply unless it is finite and has this shape and dtype."""
        try:
            assembler = Assembler(self.header, parts=self.parts)
        except RequestRejected as error:
            raise BadReply(f"the server's answer cannot be decoded: {error}") from None
        if not assembler.complete or assembler.shape != tuple(shape) or assembler.dtype != dtype:
            raise BadReply(
                f"the server answered {list(assembler.shape)} of {assembler.dtype}: expected {list(shape)} of {dtype}"
            )
        tensor = assembler.tensor()
        if not all_finite(tensor):
            raise NotFinite("the server answered values that are not finite (NaN or infinity)")
        return tensor


@dataclass(frozen=True)
class Context:
    """The data that accompanies hidden states unchanged through all hops, in wire form.

    Attributes:
        adapter: the adapter that is added to the blocks.
        dropout_seed: the seed that decides which elements the adapter's dropout drops; 0: none.
        packed, joined: see ``BlockInput``.
    """

    attention_mask: pb.AttentionMask | None
    position_ids: pb.Tensor | None
    adapter: AdapterSnapshot = NOTHING
    dropout_seed: int = 0
    packed: bool = False
    joined: pb.Tensor | None = None

    @classmethod
    def of(cls, inputs: BlockInput, adapter: AdapterSnapshot = NOTHING, dropout_seed: int = 0) -> Context:
        """Encode the context of these inputs. Raise RequestRejected if mask or positions are too many for a message."""
        mask, positions = encode_mask(inputs.attention_mask), encode_positions(inputs.position_ids)
        return cls(mask, positions, adapter, dropout_seed, inputs.packed, encode_joined(inputs.joined))
