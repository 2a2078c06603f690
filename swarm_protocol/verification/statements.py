"""Signed statements of what a server has computed, which peers can check and the server cannot deny.

A statement contains a sketch instead of the output, which may be large. The sketch has projections on random
directions, which show how far another output is from this one (Johnson and Lindenstrauss, 1984).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from google.protobuf.message import DecodeError

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.hivemind_parts import RSAPublicKey
from swarm_protocol.net.identity import Identity, peer_id_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import RoundingKind
from swarm_protocol.wire.block_input import BlockInput

SKETCH_POSITIONS = 16  # the last positions, or all if there are fewer
DIRECTIONS = 8
_MAX_SKETCH = SKETCH_POSITIONS * DIRECTIONS
_MAX_BYTES = 4096
_SENTENCE = b"swarm statement 1\0"  # prefix of the signed bytes, so that no other signed message passes for a statement


@dataclass(frozen=True)
class OutputStatement:
    """A claim that blocks map inputs with this digest to an output with this sketch.

    Attributes:
        sketch: [positions, DIRECTIONS].
        made_at: Unix time in seconds.
    """

    peer_id: str
    model: str
    revision: str
    span: Span
    kind: RoundingKind
    input_digest: bytes
    sketch: torch.Tensor
    made_at: float

    @classmethod
    def parse(cls, message: pb.SignedStatement) -> OutputStatement:
        """Parse a statement; raise ValueError if it is invalid, or not signed by the peer that it names."""
        if max(len(message.content), len(message.signature), len(message.public_key)) > _MAX_BYTES:
            raise ValueError(f"a statement is too long: expected at most {_MAX_BYTES} bytes")
        try:
            content = pb.Statement.FromString(message.content)
        except DecodeError:
            raise ValueError("a statement cannot be read") from None
        span = Span(content.blocks.start, content.blocks.end)
        if not 0 < len(content.sketch) <= _MAX_SKETCH or len(content.sketch) % DIRECTIONS:
            raise ValueError(f"a statement has a sketch of {len(content.sketch)} numbers")
        if not all(map(isfinite, (*content.sketch, content.made_at))):
            raise ValueError("a statement has numbers that are not finite")
        if peer_id_of(message.public_key) != content.peer_id:
            raise ValueError("a statement is signed by another peer than it names")
        if not RSAPublicKey.from_bytes(message.public_key).verify(_SENTENCE + message.content, message.signature):
            raise ValueError("the signature of a statement is wrong")
        return cls(
            content.peer_id,
            content.model,
            content.revision,
            span,
            RoundingKind(content.quant, content.dtype, content.device),
            content.input_digest,
            torch.tensor(content.sketch, dtype=torch.float64).view(-1, DIRECTIONS),
            content.made_at,
        )

    def is_by(self, server: ServerRecord, span: Span) -> bool:
        """Return whether this server made this statement about its model and these blocks, with its present kind."""
        of_record = server.peer_id, server.model, server.revision, server.kind
        return (self.peer_id, self.model, self.revision, self.kind, self.span) == (*of_record, span)

    def is_about(self, inputs: BlockInput, output: torch.Tensor) -> bool:
        """Return whether the statement is about these inputs and exactly this output, [positions, hidden_size]."""
        found = sketch_of(output, self.input_digest).float().double()  # rounded as the message rounds it
        return self.input_digest == digest_of(inputs) and torch.equal(found, self.sketch)


class Signer:
    """The maker of signed statements in the name of one server. Thread-safe."""

    def __init__(self, identity: Identity, record: Callable[[], pb.ServerRecord], clock: Callable[[], float]) -> None:
        """Set the identity; ``record`` returns the server's current record, ``clock`` Unix time in seconds."""
        self._identity = identity
        self._record = record
        self._clock = clock

    def sign(self, span: Span, inputs: BlockInput, output: torch.Tensor) -> pb.SignedStatement:
        """Sign a statement. inputs: one row; output: [positions, hidden_size]. Takes a millisecond."""
        record, digest = self._record(), digest_of(inputs)
        content = pb.Statement(
            peer_id=self._identity.peer_id,
            model=record.model,
            revision=record.revision,
            blocks=pb.Span(start=span.start, end=span.end),
            quant=record.quant,
            dtype=record.dtype,
            device=record.device,
            input_digest=digest,
            sketch=sketch_of(output, digest).flatten().tolist(),
            made_at=self._clock(),
        ).SerializeToString()
        return pb.SignedStatement(
            content=content,
            signature=self._identity.private_key.sign(_SENTENCE + content),
            public_key=self._identity.public_key,
        )


def digest_of(inputs: BlockInput) -> bytes:
    """Return SHA-256 over shape, dtype and bytes of the hidden states, mask and positions, each after its length.

    ``joined`` follows only where there is one, so that text has the digest that earlier versions compute.
    """
    hidden = inputs.hidden.contiguous()
    digest = hashlib.sha256(f"{list(hidden.shape)} {hidden.dtype} {inputs.packed}".encode())
    mask, positions = inputs.attention_mask, inputs.position_ids
    for tensor in (
        hidden,
        None if mask is None else (mask != 0).to(torch.uint8),
        None if positions is None else positions.to(torch.int64),
        *(() if inputs.joined is None else (inputs.joined.to(torch.uint8),)),
    ):
        data = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def sketch_of(output: torch.Tensor, seed: bytes) -> torch.Tensor:
    """Project the last positions on directions whose elements are 1 or -1.

    output: [positions, hidden_size]. Returns [at most SKETCH_POSITIONS, DIRECTIONS], float64. The mean square of a row
    is on average the squared norm of that position.
    """
    hidden_size = output.shape[1]
    num_bytes = -(-hidden_size * DIRECTIONS // 8)  # one bit for each element of each direction
    packed = torch.frombuffer(bytearray(hashlib.shake_256(b"directions" + seed).digest(num_bytes)), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8)) & 1
    directions = 1 - 2 * bits.flatten()[: hidden_size * DIRECTIONS].view(DIRECTIONS, hidden_size).double()
    return output[-SKETCH_POSITIONS:].double() @ directions.T
