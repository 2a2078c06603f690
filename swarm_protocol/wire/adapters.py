"""Adapters that a client adds to servers' blocks: low-rank matrices beside linear layers, and prompts before blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite

import torch
from google.protobuf.message import DecodeError

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import Assembler, encode_whole
from swarm_protocol.wire.parsing import read_varint

MIN_SALT_BYTES = 16
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class LowRank:
    """A term ``scaling * (dropped(x) @ a.T @ b.T)`` for the output of a linear layer (Hu et al., "LoRA", 2021).

    Attributes:
        module: path inside the block, such as ``self_attn.q_proj``.
        dropout: probability with which elements of x are dropped, in passes that have a seed.
        a: [rank, in_features] fp32.
        b: [out_features, rank] fp32.
    """

    block: int
    module: str
    scaling: float
    a: torch.Tensor
    b: torch.Tensor
    dropout: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """A term for the hidden states that enter a block, at the first positions of every row.

    Attributes:
        values: [positions, hidden_size] fp32.
    """

    block: int
    values: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """One version of a client's adapter; a secret ``salt`` makes its key unguessable for others."""

    salt: bytes
    low_rank: tuple[LowRank, ...] = ()
    prompts: tuple[Prompt, ...] = ()

    def over(self, span: Span) -> Adapter:
        """Return the parts of the adapter in these blocks."""
        return replace(
            self,
            low_rank=tuple(part for part in self.low_rank if part.block in span),
            prompts=tuple(part for part in self.prompts if part.block in span),
        )

    def mapped(self, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Adapter:
        """Return the same adapter with ``change(tensor, block)`` applied to every tensor."""
        pairs = ((part, change(part.a, part.block), change(part.b, part.block)) for part in self.low_rank)
        return replace(
            self,
            low_rank=tuple(replace(part, a=a, b=b) for part, a, b in pairs),
            prompts=tuple(replace(prompt, values=change(prompt.values, prompt.block)) for prompt in self.prompts),
        )

    def moved(self, device_of: Callable[[int], torch.device]) -> Adapter:
        """Return the same adapter with the tensors of each block on its device."""
        return self.mapped(lambda tensor, block: tensor.to(device_of(block)))

    @property
    def is_empty(self) -> bool:
        return not self.low_rank and not self.prompts

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return a and b of each low-rank part, then the prompts: the order in which gradients come back."""
        matrices = [matrix for part in self.low_rank for matrix in (part.a, part.b)]
        return (*matrices, *(prompt.values for prompt in self.prompts))

    def serialize(self) -> tuple[bytes, bytes]:
        """Return the adapter for the wire, and its key."""
        message = pb.Adapter(
            salt=self.salt,
            low_rank=[
                pb.LowRank(
                    block=part.block,
                    module=part.module,
                    scaling=part.scaling,
                    dropout=part.dropout,
                    a=encode_whole(part.a.float()),
                    b=encode_whole(part.b.float()),
                )
                for part in self.low_rank
            ],
            prompts=[pb.Prompt(block=each.block, values=encode_whole(each.values.float())) for each in self.prompts],
        )
        data = message.SerializeToString(deterministic=True)  # the same adapter has the same key
        return data, adapter_key(data)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Adapter:
        """Parse an adapter; raise RequestRejected if shapes do not match, or numbers are out of range.

        Parts are parsed one by one: as a whole, a message of many tiny parts would take a hundred times its size.
        """
        salt, low_rank, prompts = b"", [], []
        try:
            for number, value in _fields(memoryview(data)):
                if number == pb.Adapter.SALT_FIELD_NUMBER:
                    salt = bytes(value)
                elif number == pb.Adapter.LOW_RANK_FIELD_NUMBER:
                    low_rank.append(_low_rank(pb.LowRank.FromString(value)))  # type: ignore[arg-type]
                elif number == pb.Adapter.PROMPTS_FIELD_NUMBER:
                    prompt = pb.Prompt.FromString(value)  # type: ignore[arg-type]
                    prompts.append(Prompt(prompt.block, _decoded(prompt.values, 2)))
                if len(low_rank) + len(prompts) > MAX_PARTS:
                    raise RequestRejected(f"the adapter has more than {MAX_PARTS} parts")
        except (DecodeError, IndexError, UnicodeDecodeError):
            raise RequestRejected("the adapter cannot be read") from None
        if len(salt) < MIN_SALT_BYTES:
            raise RequestRejected(f"the adapter's salt has {len(salt)} bytes: expected {MIN_SALT_BYTES}")
        return cls(salt, tuple(low_rank), tuple(prompts))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of a message that has only length-delimited fields.

    See https://protobuf.dev/programming-guides/encoding/. Raises IndexError if the message is cut off.
    """
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        size, position = read_varint(data, position)
        if tag & 7 != 2 or size > len(data) - position:  # 2: length-delimited
            raise IndexError
        yield tag >> 3, data[position : position + size]
        position += size


def _low_rank(message: pb.LowRank) -> LowRank:
    a, b = _decoded(message.a, 2), _decoded(message.b, 2)
    if a.shape[0] != b.shape[1]:
        raise RequestRejected(f"low-rank matrices have shapes {list(a.shape)} and {list(b.shape)}: no rank fits")
    if not isfinite(message.scaling) or not 0 <= message.dropout < 1:
        raise RequestRejected(f"scaling {message.scaling} or dropout {message.dropout} is out of range")
    return LowRank(message.block, message.module, message.scaling, a, b, message.dropout)


def adapter_key(data: bytes | bytearray) -> bytes:
    """Return the key of a serialised adapter."""
    return hashlib.sha256(data).digest()


def _decoded(wire: pb.Tensor, num_dims: int) -> torch.Tensor:
    assembler = Assembler(wire)
    if not assembler.complete or len(assembler.shape) != num_dims or assembler.dtype != torch.float32:
        raise RequestRejected("a tensor of the adapter is incomplete, or no matrix in float32")
    tensor = assembler.tensor()
    if not bool(torch.isfinite(tensor).all()):
        raise RequestRejected("a tensor of the adapter is not finite (it contains NaN or infinity)")
    return tensor
