"""Outputs of steps in the form that their clients, or the next servers, get."""

from __future__ import annotations

import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import EncodedRows, encode_into
from swarm_server.engine.scheduler import Scheduler


class StepOutputs:
    """The outputs of steps that were computed together, as their clients get them."""

    def __init__(self, outputs: torch.Tensor, num_steps: int, scheduler: Scheduler) -> None:
        """Keep the outputs of one step, or the rows [1, hidden_size] of several steps."""
        self._outputs = outputs
        self._num_steps = num_steps
        self._load = pb.Output(active_sessions=scheduler.num_active, queue_s=scheduler.queue_s)
        self._rows: dict[pb.Codec, EncodedRows] = {}
        # For each codec, the answer to the last step, with its output and hidden states: most of it is the same in all.
        self._answers: dict[pb.Codec, tuple[pb.KeyedReply, pb.Output, pb.Tensor]] = {}

    def of(self, number: int) -> torch.Tensor:
        """Return the output of one step."""
        return self._outputs if self._num_steps == 1 else self._outputs[number : number + 1]

    def encode_into(self, hidden: pb.Tensor, number: int, codec: pb.Codec) -> list[bytes]:
        """Encode the output of one step into an empty message, and return the parts that follow it."""
        if self._num_steps == 1:
            return encode_into(hidden, self._outputs, codec)
        rows = self._rows_in(codec)
        hidden.MergeFrom(rows.header)  # in half of the time that it takes to set all fields
        hidden.data = rows.data[number]
        return []

    def fill(self, answer: pb.Output, request: pb.Step, codec: pb.Codec) -> list[bytes]:
        """Fill in the answer to a step that was computed alone or wants no outputs; return the parts that follow it."""
        answer.number = request.number
        num_wanted = request.outputs_wanted if request.HasField("outputs_wanted") else None
        if num_wanted == 0:
            return []
        answer.MergeFrom(self._load)
        output = self._outputs
        wanted = output if num_wanted in (None, output.shape[1]) else output[:, -num_wanted:]
        return encode_into(answer.hidden, wanted, codec)

    def entry(self, session_key: bytes, request: pb.Step, number: int, codec: pb.Codec) -> bytes | None:
        """Return the answer to a step as an encoded ``KeyedReply``; None if it does not fit into one."""
        if self._num_steps == 1 or (not request.outputs_wanted and request.HasField("outputs_wanted")):
            keyed = pb.KeyedReply(session_key=session_key)
            return None if self.fill(keyed.reply.output, request, codec) else keyed.SerializeToString()
        rows = self._rows_in(codec)
        if codec not in self._answers:
            keyed = pb.KeyedReply()
            answer = keyed.reply.output
            answer.MergeFrom(self._load)
            answer.hidden.MergeFrom(rows.header)
            self._answers[codec] = keyed, answer, answer.hidden
        keyed, answer, hidden = self._answers[codec]
        keyed.session_key, answer.number, hidden.data = session_key, request.number, rows.data[number]
        return keyed.SerializeToString()

    def _rows_in(self, codec: pb.Codec) -> EncodedRows:
        if codec not in self._rows:
            self._rows[codec] = EncodedRows(self._outputs, codec)
        return self._rows[codec]
