"""Evidence that a server answers wrongly: what it has signed is not what its blocks make of inputs nobody has chosen.

The inputs follow from a seed. So evidence is small, tells nothing of what anybody has written, and nobody can look for
inputs at which honest servers differ.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.comparison import Bounds, Kind
from swarm_protocol.verification.statements import SKETCH_POSITIONS, Statement, digest_of, sketch_of
from swarm_protocol.wire.block_input import BlockInput

SEED_BYTES = 16
MAX_HIDDEN_SIZE = 1 << 17
LASTS_S = 24 * 3600.0  # after the statement was made
_CLOCK_SKEW_S = 60.0
_MARGIN = 1.5  # beyond the bounds for two outputs: a sketch is known to a tenth
_TINY = 1e-20


class Expired(ValueError):
    """Evidence that does not count any more, or not yet where a clock is wrong: nobody's fault."""


def new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def probe(seed: bytes, hidden_size: int) -> BlockInput:
    """Hidden states [1, SKETCH_POSITIONS, hidden_size], about normal, the same bits on every machine.

    Each is the sum of four uniform numbers (Irwin and Hall, 1927).
    """
    shape = (SKETCH_POSITIONS, hidden_size, 4)
    data = hashlib.shake_256(b"probe" + seed).digest(SKETCH_POSITIONS * hidden_size * 4)
    sums = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape).sum(-1, dtype=torch.int32)
    return BlockInput(((sums - 510).float() / 128)[None])


@dataclass(frozen=True)
class Evidence:
    """A statement about a ``probe``.

    Attributes:
        message: its wire form.
    """

    statement: Statement
    inputs: BlockInput
    message: pb.Evidence

    @classmethod
    def parse(cls, message: pb.Evidence, now: float) -> Evidence:
        """``now``: Unix time in seconds. Raises ValueError if it is none, ``Expired`` if it is too old."""
        statement = Statement.parse(message.statement)
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
        """Raises ValueError, see ``parse``."""
        return cls.parse(pb.Evidence(statement=statement, seed=seed, hidden_size=hidden_size), now)

    def excess(self, output: torch.Tensor, kind: Kind, routed: bool) -> float | None:
        """By how many times what honest servers may differ by, the statement is off; None if that cannot be told.

        output: [SKETCH_POSITIONS, hidden_size] as a server of this ``kind`` has computed it. ``routed``: blocks choose
        among experts; who makes seeds may then look for one at which rounding decides.
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
    """By how many times ``bounds`` two sketches differ; below 1 for honest servers.

    change: [positions], how much the blocks change each position, a norm.
    """
    errors = (ours - theirs).square().mean(-1).sqrt() / change.clamp(min=_TINY)
    return float(errors.median()) / (_MARGIN * bounds.error)
