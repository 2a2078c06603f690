"""What a client adds to the blocks of others: low-rank matrices beside linear layers, and prompts before blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import isfinite

import torch

from swarm_protocol.codec import Assembler, encode
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

MIN_SALT_BYTES = 16
MAX_ADAPTER_BYTES = 256 << 20  # of one adapter over one span, serialised


@dataclass(frozen=True)
class LowRank:
    """Adds ``scaling * (dropped(x) @ a.T @ b.T)`` to the output of a linear layer (Hu et al., "LoRA", 2021).

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
    """Added to the hidden states that enter a block, at the first positions of every row.

    Attributes:
        values: [positions, hidden_size] fp32.
    """

    block: int
    values: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """One version of a client's adapter; ``salt`` keeps its key to the client."""

    salt: bytes
    low_rank: tuple[LowRank, ...] = ()
    prompts: tuple[Prompt, ...] = ()

    def over(self, span: Span) -> Adapter:
        """What of it lies in these blocks."""
        return replace(
            self,
            low_rank=tuple(part for part in self.low_rank if part.block in span),
            prompts=tuple(part for part in self.prompts if part.block in span),
        )

    @property
    def is_empty(self) -> bool:
        return not self.low_rank and not self.prompts

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """a and b of each low-rank part, then the prompts: the order in which gradients come back."""
        matrices = [matrix for part in self.low_rank for matrix in (part.a, part.b)]
        return (*matrices, *(prompt.values for prompt in self.prompts))

    def serialize(self) -> tuple[bytes, bytes]:
        """The adapter for the wire, and its key."""
        message = pb.Adapter(
            salt=self.salt,
            low_rank=[
                pb.LowRank(
                    block=part.block,
                    module=part.module,
                    scaling=part.scaling,
                    dropout=part.dropout,
                    a=_encoded(part.a),
                    b=_encoded(part.b),
                )
                for part in self.low_rank
            ],
            prompts=[pb.Prompt(block=prompt.block, values=_encoded(prompt.values)) for prompt in self.prompts],
        )
        data = message.SerializeToString(deterministic=True)
        return data, adapter_key(data)

    @classmethod
    def parse(cls, data: bytes) -> Adapter:
        """Raises RequestRejected if it is no adapter: shapes that do not fit one another, numbers out of range."""
        try:
            message = pb.Adapter.FromString(data)
        except Exception:  # DecodeError, and whatever else a stranger's bytes provoke
            raise RequestRejected("the adapter cannot be read") from None
        if len(message.salt) < MIN_SALT_BYTES:
            raise RequestRejected(f"the adapter's salt has {len(message.salt)} bytes: expected {MIN_SALT_BYTES}")
        low_rank = []
        for part in message.low_rank:
            a, b = _decoded(part.a, 2), _decoded(part.b, 2)
            if a.shape[0] != b.shape[1]:
                raise RequestRejected(
                    f"low-rank matrices have shapes {list(a.shape)} and {list(b.shape)}: no rank fits"
                )
            if not isfinite(part.scaling) or not 0 <= part.dropout < 1:
                raise RequestRejected(f"scaling {part.scaling} or dropout {part.dropout} is out of range")
            low_rank.append(LowRank(part.block, part.module, part.scaling, a, b, part.dropout))
        prompts = tuple(Prompt(prompt.block, _decoded(prompt.values, 2)) for prompt in message.prompts)
        return cls(message.salt, tuple(low_rank), prompts)


def adapter_key(data: bytes) -> bytes:
    """The key of a serialised adapter."""
    return hashlib.sha256(data).digest()


def _encoded(tensor: torch.Tensor) -> pb.Tensor:
    header, parts = encode(tensor.detach().to("cpu", torch.float32))
    return pb.Tensor(
        dtype=header.dtype,
        shape=header.shape,
        codec=header.codec,
        size_bytes=header.size_bytes,
        data=b"".join([header.data, *parts]),
    )


def _decoded(wire: pb.Tensor, num_dims: int) -> torch.Tensor:
    assembler = Assembler(wire)
    if not assembler.complete or len(assembler.shape) != num_dims or assembler.dtype != torch.float32:
        raise RequestRejected("a tensor of the adapter is incomplete, or no matrix in float32")
    tensor = assembler.tensor()
    if not bool(torch.isfinite(tensor).all()):
        raise RequestRejected("a tensor of the adapter is not finite (it contains NaN or infinity)")
    return tensor
