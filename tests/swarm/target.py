"""A server to be sent requests such as no honest client sends, and what its answers must be."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import grpc
import torch

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode, encode
from swarm_protocol.wire.constants import MAX_TENSOR_BYTES, WIRE_VERSION
from tests.swarm.raw_client import Answer, RawClient
from tests.zoo import HIDDEN, POSITIONS

HOSTED = (1, 5)
ROOM = 40  # tokens of sessions that keep their outputs: 4 blocks take 1024 bytes of keys and values, the output 256
LAST_ROOM = 50  # of sessions whose outputs go to the client
TOKENS = 6
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MOVED = grpc.StatusCode.FAILED_PRECONDITION
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN = grpc.StatusCode.NOT_FOUND


@dataclass(frozen=True)
class Target:
    """A server of blocks 1:5, and what the whole model has before and after these blocks, [1, TOKENS, HIDDEN]."""

    client: RawClient
    hidden: torch.Tensor
    expected: torch.Tensor

    def contract(self, **fields) -> pb.Contract:
        record: ServerRecord = self.client.record
        blocks = pb.Span(start=HOSTED[0], end=HOSTED[1])
        honest = {
            "wire_version": WIRE_VERSION,
            "model": record.model,
            "revision": record.revision,
            "blocks": blocks,
        }
        return pb.Contract(**{**honest, **fields})

    def forward(self, hidden: pb.Tensor | None = None, **fields) -> pb.Forward:
        return pb.Forward(**{"contract": self.contract(), "hidden": hidden or wire(self.hidden), **fields})

    def open(self, **fields) -> pb.SessionRequest:
        known = {"contract": self.contract(), "session_key": secrets.token_bytes(16), "batch_size": 1}
        return pb.SessionRequest(open=pb.Open(**(known | fields)))

    def talk(self, *requests: pb.SessionRequest) -> Answer:
        """Sends a session's requests, with a number for every step that has none."""
        number = 0
        for request in requests:
            if request.WhichOneof("kind") == "step":
                number += 1
                request.step.number = request.step.number or number
        return self.client.session(*requests)

    def step(self, start: int = 0, hidden: torch.Tensor | pb.Tensor | None = None, **fields) -> pb.SessionRequest:
        hidden = self.hidden if hidden is None else hidden
        hidden = wire(hidden) if isinstance(hidden, torch.Tensor) else hidden
        return pb.SessionRequest(step=pb.Step(start_position=start, hidden=hidden, **fields))


CLOSE = pb.SessionRequest(close=pb.Close())
MORE = pb.SessionRequest(more=bytes(8))


def wire(tensor: torch.Tensor) -> pb.Tensor:
    return encode(tensor)[0]


def positions(start: int, end: int) -> pb.Tensor:
    return wire(torch.arange(start, end, dtype=torch.int32)[None])


def header(*shape: int, dtype: int = pb.FLOAT32, size_bytes: int | None = None, **fields) -> pb.Tensor:
    """A tensor that is announced but does not come."""
    size_bytes = 4 * torch.Size(shape).numel() if size_bytes is None else size_bytes
    return pb.Tensor(dtype=dtype, shape=shape, size_bytes=size_bytes, **fields)


def filled(value: float) -> torch.Tensor:
    hidden = torch.zeros(1, TOKENS, HIDDEN)
    hidden[0, 2, 5] = value
    return hidden


def assert_session_works(answer: Answer, target: Target, index: int) -> None:
    """Reply ``index`` is what the whole model computes, and the session ended well."""
    assert torch.equal(decode(answer.replies[index].output.hidden), target.expected)
    assert answer.status is grpc.StatusCode.OK


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of a matrix product of another size."""
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


def assert_step_refused(answer: Answer, index: int, status: grpc.StatusCode, pattern: str) -> None:
    """Reply ``index`` is the failure of a step."""
    assert answer.replies[index].failure.status == status.value[0]
    assert_one_sentence(answer.replies[index].failure.message, pattern)


def assert_refused(answer: Answer, status: grpc.StatusCode, pattern: str) -> None:
    """Nothing was answered but this status and one sentence."""
    assert (answer.replies, answer.status) == ([], status), answer
    assert_one_sentence(answer.details, pattern)


def assert_one_sentence(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text
    assert "\n" not in text and "Traceback" not in text and len(text) < 250


# ------------------------------------------------------------ what any request may get wrong

BAD_INPUTS = {
    "hidden-size": (
        {"hidden": header(1, 3, HIDDEN + 1)},
        rf"shape \[1, 3, {HIDDEN + 1}\]: expected \[batch, tokens, {HIDDEN}\]",
    ),
    "rank-2": ({"hidden": header(3, HIDDEN)}, rf"shape \[3, {HIDDEN}\]: expected \[batch, tokens, {HIDDEN}\]"),
    "too-many-rows": ({"hidden": header(5000, 1, HIDDEN)}, "batch size 5000 is out of range: expected 1 to 4096"),
    "unknown-dtype": ({"hidden": header(1, 3, HIDDEN, dtype=99)}, "expected float32, bfloat16 or float16"),
    "unknown-codec": ({"hidden": header(1, 3, HIDDEN, codec=7)}, "codec 7 .* is unknown"),
    "huge": ({"hidden": header(1, 2**62, HIDDEN, size_bytes=2**63)}, f"is over the limit of {MAX_TENSOR_BYTES} bytes"),
    "longer-than-the-model": (
        {"hidden": header(1, POSITIONS + 1, HIDDEN)},
        f"257 positions are more than the model's {POSITIONS}",
    ),
    "more-than-announced": (
        {"hidden": pb.Tensor(dtype=pb.FLOAT32, shape=(1, 1, HIDDEN), size_bytes=256, data=bytes(257))},
        "more than the announced 256 bytes",
    ),
    "nan": ({"hidden": wire(filled(float("nan")))}, "hidden states sent are not finite"),
    "infinity": ({"hidden": wire(filled(float("inf")))}, "hidden states sent are not finite"),
    "mask-too-big": ({"attention_mask": pb.AttentionMask(values=b"\1" * 2)}, "2 bytes, .* 6 positions need 1"),
    "too-few-positions": ({"position_ids": positions(0, 5)}, r"shape \[1, 5\]: expected int32 \[1, 6\]"),
    "fractional-positions": ({"position_ids": wire(torch.zeros(1, 6))}, "expected int32"),
    "negative-positions": ({"position_ids": positions(-1, 5)}, "from -1 to 4 are outside"),
    "positions-that-do-not-come": ({"position_ids": header(1, 6, dtype=pb.INT32, size_bytes=24)}, "only 0 of 24 bytes"),
}
