"""What a peer has answered at this step, as far as it takes to sign it: two digests of each answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm_stages.audit.statements import answer_digest, read_answer, request_digest
from swarm_stages.pb import stages_pb2 as pb

_MOST = 8192


@dataclass(frozen=True)
class Given:
    """``request``, ``answer``: digests, see ``Statement``."""

    work: pb.Work
    request: bytes
    answer: bytes


class Answers:
    """The newest of them. ``note`` is called for one answer at a time by any thread, the rest on the event loop."""

    def __init__(self) -> None:
        self._given: OrderedDict[tuple[str, bytes, bool], Given] = OrderedDict()

    def note(
        self,
        trainer: str,
        work: pb.Work,
        tensors: Mapping[str, Tensor],
        replies: Sequence[pb.ComputeReply],
        *,
        is_backward: bool,
    ) -> None:
        """``tensors``: of the request, by field, as they have arrived."""
        answer = answer_digest(read_answer(work.reply_form, replies))
        self._given[trainer, _key(work.micro_batch), is_backward] = Given(work, request_digest(tensors), answer)
        while len(self._given) > _MOST:
            self._given.popitem(last=False)

    def given(self, trainer: str, micro_batch: pb.MicroBatch, *, is_backward: bool) -> Given | None:
        return self._given.get((trainer, _key(micro_batch), is_backward))


def _key(micro_batch: pb.MicroBatch) -> bytes:
    return micro_batch.SerializeToString(deterministic=True)
