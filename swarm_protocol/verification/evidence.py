"""Evidence of a wrong answer: a server's signed output differs from its blocks' output for inputs no peer has chosen.

A seed determines the inputs. Therefore evidence is small and reveals no user's text, and no peer can search for inputs
at which honest servers differ.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.comparison import Bounds, RoundingKind
from swarm_protocol.verification.statements import SKETCH_POSITIONS, OutputStatement, digest_of, sketch_of
from swarm_protocol.wire.block_input import BlockInput

SEED_BYTES = 16
MAX_HIDDEN_SIZE = 1 << 17
LASTS_S = 24 * 3600.0  # after the statement was made
_CLOCK_SKEW_S = 60.0
_MARGIN = 1.5  # beyond the bounds for two outputs: a sketch has an accuracy of a tenth
_TINY = 1e-20


class Expired(ValueError):
    """Evidence that has expired, or is not valid yet because a clock is wrong: not a peer's fault."""


def new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def probe(seed: bytes, hidden_size: int) -> BlockInput:
    """Return hidden states [1, SKETCH_POSITIONS, hidden_size], about normal, with the same bits on every machine.

    Each is the sum of four uniform numbers (Irwin and Hall, 1927).
    """
    shape = (SKETCH_POSITIONS, hidden_size, 4)
    data = hashlib.shake_256(b"probe" + seed).digest(SKETCH_POSITIONS * hidden_size * 4)
    sums = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape).sum(-1, dtype=torch.int32)
    # Four bytes have the sum 510 on average, with a standard deviation of 148. Integers are the same on all machines.
    return BlockInput(((sums - 510).float() / 128)[None])


@dataclass(frozen=True)
class Evidence:
    """A server's statement about the inputs of a ``probe``.

    Attributes:
        message: the wire form of the evidence.
    """

    statement: OutputStatement
    inputs: BlockInput
    message: pb.Evidence

    @classmethod
    def parse(cls, message: pb.Evidence, now: float) -> Evidence:
        """Parse evidence at the Unix time ``now`` in seconds; raise ValueError if invalid, ``Expired`` if too old."""
        statement = OutputStatement.parse(message.statement)
        if len(message.seed) != SEED_BYTES:
            raise ValueError(f"evidence has a seed of {len(message.seed)} bytes: expected {SEED_BYTES}")
        if not 0 < message.hidden_size <= MAX_HIDDEN_SIZE:
            raise ValueError(f"evidence is about hidden states of {message.hidden_size} numbers")
        if not now - LASTS_S <= statement.made_at <= now + _CLOCK_SKEW_S:
            raise Expired("evidence has expired, or a clock is wrong")
        inputs = probe(message.seed, message.hidden_size)
        if statement.input_digest != digest_of(inputs):
            raise ValueError("evidence is about other inputs than its seed gives")
        return cls(statement, inputs, message)

    @classmethod
    def of(cls, statement: pb.SignedStatement, seed: bytes, hidden_size: int, now: float) -> Evidence:
        """Create evidence from a statement; raise ValueError, see ``parse``."""
        return cls.parse(pb.Evidence(statement=statement, seed=seed, hidden_size=hidden_size), now)

    def excess(self, output: torch.Tensor, kind: RoundingKind, routed: bool) -> float | None:
        """Return the statement's error as a multiple of what honest servers may have; None if that is unknown.

        output: [SKETCH_POSITIONS, hidden_size] as computed by a server of this ``kind``. ``routed``: blocks choose
        among experts; the maker of a seed could then search for one at which rounding decides.
        """
        statement = self.statement
        if routed:
            return None
        bounds = Bounds.of(statement.kind, kind, len(statement.span), routed)
        ours, theirs = sketch_of(output, statement.input_digest), statement.sketch
        if ours.shape != theirs.shape:
            return float("inf")
        change = (output - self.inputs.hidden[0]).double().norm(dim=-1)
        return sketch_excess(ours, theirs, change, bounds)


def sketch_excess(ours: torch.Tensor, theirs: torch.Tensor, change: torch.Tensor, bounds: Bounds) -> float:
    """Return the difference of two sketches as a multiple of ``bounds``; below 1 for honest servers.

    ours, theirs: [positions, DIRECTIONS]. change: [positions], the norm of the blocks' change to each position.
    """
    errors = (ours - theirs).square().mean(-1).sqrt() / change.clamp(min=_TINY)
    return float(errors.median()) / (_MARGIN * bounds.error)
