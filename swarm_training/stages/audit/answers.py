"""The newest answers of a peer: two digests of each, which is all that a signed statement needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm_training.stages.audit.statements import answer_digest, request_digest
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import read_answer

_MOST = 8192  # answers that are kept


@dataclass(frozen=True)
class AnswerDigests:
    """The digests of one request and its answer, see ``AnswerStatement``."""

    work: pb.Work
    request: bytes
    answer: bytes


class AnswerLog:
    """The log of a peer's newest answers. Any thread may call ``note``; ``given`` is for the event loop."""

    def __init__(self) -> None:
        self._given: OrderedDict[tuple[str, bytes, bool], AnswerDigests] = OrderedDict()

    def note(
        self,
        trainer: str,
        work: pb.Work,
        tensors: Mapping[str, Tensor],
        replies: Sequence[pb.ComputeReply],
        *,
        is_backward: bool,
    ) -> None:
        """Add one answer. ``tensors``: the request's tensors by field, with the values that arrived over the wire."""
        answer = answer_digest(read_answer(work.reply_form, replies))
        self._given[trainer, _key(work.micro_batch), is_backward] = AnswerDigests(work, request_digest(tensors), answer)
        while len(self._given) > _MOST:
            self._given.popitem(last=False)

    def given(self, trainer: str, micro_batch: pb.MicroBatch, *, is_backward: bool) -> AnswerDigests | None:
        return self._given.get((trainer, _key(micro_batch), is_backward))


def _key(micro_batch: pb.MicroBatch) -> bytes:
    return micro_batch.SerializeToString(deterministic=True)
