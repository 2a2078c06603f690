"""The statement that a peer signs about an answer it has given, so that other peers can check the answer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_models.checkpoints.safetensors_bytes import data_of
from swarm_protocol.net.identity import Identity
from swarm_protocol.wire.codec import Assembler
from swarm_training.ledger.signing import ContentKind, parsed, sign, signer_of
from swarm_training.pb import training_ledger_pb2 as ledger_pb
from swarm_training.stages.audit.sketch import BUCKETS, SEED_BYTES
from swarm_training.stages.pb import stages_audit_pb2 as audit_pb
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.forms import decoded, encode_as

MAX_STATEMENT_BYTES = 8192


@dataclass(frozen=True)
class AnswerStatement:
    """A peer's statement about one answer, see ``stages_audit.proto``. ``peer_id``: the peer that has signed it."""

    peer_id: str
    work: pb.Work
    is_backward: bool
    request: bytes
    answer: bytes
    seed: bytes
    sketch: tuple[float, ...]

    @classmethod
    def read(cls, signed: ledger_pb.SignedByPeer) -> AnswerStatement:
        """Return the statement in a signed message. Raises ValueError if there is none, or its signature is wrong."""
        peer_id = signer_of(ContentKind.STATEMENT, signed)
        message = parsed(audit_pb.Statement, signed.content, MAX_STATEMENT_BYTES)
        sketch = tuple(message.sketch)
        if len(sketch) not in (0, BUCKETS) or not all(map(math.isfinite, sketch)):
            raise ValueError(f"a statement has a sketch of {len(sketch)} numbers: expected {BUCKETS} finite ones")
        if len(message.seed) != SEED_BYTES:
            raise ValueError(f"a statement has a seed of {len(message.seed)} bytes: expected {SEED_BYTES}")
        return cls(peer_id, message.work, message.is_backward, message.request, message.answer, message.seed, sketch)

    def signed(self, identity: Identity) -> ledger_pb.SignedByPeer:
        message = audit_pb.Statement(
            work=self.work,
            is_backward=self.is_backward,
            request=self.request,
            answer=self.answer,
            seed=self.seed,
            sketch=self.sketch,
        )
        return sign(ContentKind.STATEMENT, message, identity, b"")


def request_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of a request. ``tensors``: the tensors by field, with the values that arrive at the peer."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(f"{name}:".encode())
        _add(hasher, tensors[name])
    return hasher.digest()


def answer_digest(answer: StageAnswer) -> bytes:
    """Return the SHA-256 of an answer with the values that arrive at the trainer."""
    hasher = hashlib.sha256(f"{answer.loss_sum.hex()} {answer.num_tokens}:".encode())
    if answer.tensor is not None:
        _add(hasher, answer.tensor)
    return hasher.digest()


def arrived(form: pb.Form, tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, with the values that arrive on the other side of the wire."""
    if not tensor.is_floating_point():
        return tensor
    wire, parts = encode_as(form, tensor)
    return decoded(form, Assembler(wire, parts=parts))


def evidence_form(form: pb.Form) -> pb.Form:
    """Return the form in which an answer that came in ``form`` is shown to other peers without loss."""
    return pb.FP64 if form == pb.FP64 else pb.FP32


def _add(hasher: hashlib._Hash, tensor: Tensor) -> None:
    # An answer in bf16 is shown to judges in fp32, see ``evidence_form``: its digest must be the same then.
    exact = tensor if tensor.dtype in (torch.int64, torch.float64) else tensor.float()
    hasher.update(f"{exact.dtype}{list(exact.shape)}".encode())
    hasher.update(data_of(exact))
