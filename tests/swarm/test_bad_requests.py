"""Requests no honest client sends: each is refused with one sentence, and the server lives on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_protocol.codec import decode, encode
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.records import ServerRecord
from swarm_protocol.wire import MAX_TENSOR_BYTES, WIRE_VERSION
from tests.swarm.harness import InProcessServers
from tests.swarm.raw_client import Answer, RawClient
from tests.swarm.waiting import wait_for
from tests.zoo import HIDDEN, POSITIONS, VOCAB, save_checkpoint

HOSTED = (1, 5)
ROOM = 40  # tokens
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
        return pb.SessionRequest(open=pb.Open(**{"contract": self.contract(), "batch_size": 1, **fields}))

    def step(self, start: int = 0, hidden: torch.Tensor | pb.Tensor | None = None, **fields) -> pb.SessionRequest:
        hidden = self.hidden if hidden is None else hidden
        hidden = wire(hidden) if isinstance(hidden, torch.Tensor) else hidden
        return pb.SessionRequest(step=pb.Step(start_position=start, hidden=hidden, **fields))


CLOSE = pb.SessionRequest(close=pb.Close())
MORE = pb.SessionRequest(more=bytes(8))


def wire(tensor: torch.Tensor) -> pb.Tensor:
    return encode(tensor)[0]


def header(*shape: int, dtype: int = pb.FLOAT32, size_bytes: int | None = None, **fields) -> pb.Tensor:
    """A tensor that is announced but does not come."""
    size_bytes = 4 * torch.Size(shape).numel() if size_bytes is None else size_bytes
    return pb.Tensor(dtype=dtype, shape=shape, size_bytes=size_bytes, **fields)


def filled(value: float) -> torch.Tensor:
    hidden = torch.zeros(1, TOKENS, HIDDEN)
    hidden[0, 2, 5] = value
    return hidden


@pytest.fixture(scope="module")
def idle_target(tmp_path_factory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    boundaries: list[torch.Tensor] = []
    whole.model.layers[HOSTED[0]].register_forward_pre_hook(lambda _block, inputs: boundaries.append(inputs[0]))
    whole.model.layers[HOSTED[1] - 1].register_forward_hook(lambda _block, _inputs, output: boundaries.append(output))
    with torch.no_grad():
        whole(torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0)))
    with InProcessServers(directory, cache_tokens=ROOM) as servers:
        servers.start(f"{HOSTED[0]}:{HOSTED[1]}")
        with RawClient(servers.records()[0]) as client:
            yield Target(client, *boundaries)


@pytest.fixture
def target(idle_target) -> Iterator[Target]:
    """After each test the server must have its room back and still compute what the whole model computes."""
    yield idle_target
    client = idle_target.client
    wait_for(lambda: client.describe().cache_tokens_left == ROOM, "the room of refused sessions has come back")
    (reply,) = client.forward(pb.ForwardRequest(forward=idle_target.forward())).replies
    assert torch.equal(decode(reply.output), idle_target.expected)
    assert_session_works(client.session(idle_target.open(), idle_target.step(), CLOSE), idle_target, 1)
    wait_for(lambda: client.describe().cache_tokens_left == ROOM, "the room of a good session has come back")


def assert_session_works(answer: Answer, target: Target, index: int) -> None:
    """Reply ``index`` is what the whole model computes, and the session ended well."""
    assert torch.equal(decode(answer.replies[index].output), target.expected)
    assert answer.status is grpc.StatusCode.OK


def assert_one_sentence(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text
    assert "\n" not in text and "Traceback" not in text and len(text) < 250


# ------------------------------------------------------------ forward

OVER_THE_LIMIT = f"is over the limit of {MAX_TENSOR_BYTES} bytes"
BAD_HIDDEN = {
    "hidden-size": (header(1, 3, HIDDEN + 1), rf"shape \[1, 3, {HIDDEN + 1}\]: expected \[batch, tokens, {HIDDEN}\]"),
    "rank-2": (header(3, HIDDEN), rf"shape \[3, {HIDDEN}\]: expected \[batch, tokens, {HIDDEN}\]"),
    "rank-5": (header(1, 1, 1, 3, HIDDEN), r"expected \[batch, tokens, 64\]"),
    "no-shape": (header(), r"shape \[\]: expected"),
    "no-tokens": (header(1, 0, HIDDEN), r"shape \[1, 0, 64\]: expected"),
    "no-rows": (header(0, 3, HIDDEN), "batch size 0 is out of range"),
    "negative-rows": (header(-1, 3, HIDDEN, size_bytes=0), "batch size -1 is out of range"),
    "too-many-rows": (header(5000, 1, HIDDEN), "batch size 5000 is out of range: expected 1 to 4096"),
    "integers": (header(1, 3, HIDDEN, dtype=pb.INT64), "expected float32, bfloat16 or float16"),
    "unknown-dtype": (header(1, 3, HIDDEN, dtype=99), "expected float32, bfloat16 or float16"),
    "unknown-codec": (header(1, 3, HIDDEN, codec=7), "codec 7 .* is unknown"),
    "size-and-shape-differ": (header(1, 3, HIDDEN, size_bytes=99), r"takes 768 bytes, not 99 as announced"),
    "over-the-limit": (
        header(1, 3, HIDDEN, size_bytes=MAX_TENSOR_BYTES + 1),
        f"is over the limit of {MAX_TENSOR_BYTES} bytes",
    ),
    "huge": (header(1, 2**62, HIDDEN, size_bytes=2**63), f"is over the limit of {MAX_TENSOR_BYTES} bytes"),
    "longer-than-the-model": (header(1, POSITIONS + 1, HIDDEN), f"257 positions are more than the model's {POSITIONS}"),
    "more-than-announced": (
        pb.Tensor(dtype=pb.FLOAT32, shape=(1, 1, HIDDEN), size_bytes=256, data=bytes(257)),
        "more than the announced 256 bytes",
    ),
    "nan": (wire(filled(float("nan"))), "hidden states sent are not finite"),
    "infinity": (wire(filled(float("inf"))), "hidden states sent are not finite"),
}


@pytest.mark.parametrize("name", BAD_HIDDEN)
def test_hidden_states(target, name):
    hidden, sentence = BAD_HIDDEN[name]
    answer = target.client.forward(pb.ForwardRequest(forward=target.forward(hidden)))
    assert (answer.replies, answer.status) == ([], INVALID)
    assert_one_sentence(answer.details, sentence)


@pytest.mark.parametrize("name", BAD_HIDDEN)
def test_hidden_states_of_a_step(target, name):
    """The session is as it was before, and goes on."""
    hidden, sentence = BAD_HIDDEN[name]
    expects_rows = ("no-rows", "negative-rows", "too-many-rows")
    sentence = r"expected \[1, tokens, 64\]" if name in expects_rows else sentence.replace(r"\[batch", r"\[1")
    answer = target.client.session(target.open(), target.step(hidden=hidden), target.step(), CLOSE)
    assert answer.replies[1].failure.status == INVALID.value[0]
    assert_one_sentence(answer.replies[1].failure.message, sentence)
    assert_session_works(answer, target, 2)


BAD_CONTEXT = {
    "mask-too-small": ({"attention_mask": pb.AttentionMask(values=b"\1" * 5)}, "5 entries, .* 6 positions need 6"),
    "mask-too-big": ({"attention_mask": pb.AttentionMask(values=b"\1" * 12)}, "12 entries, .* 6 positions need 6"),
    "mask-of-twos": ({"attention_mask": pb.AttentionMask(values=b"\2" * 6)}, "entries other than 0 and 1"),
    "too-few-positions": ({"position_ids": wire(torch.arange(5)[None])}, r"shape \[1, 5\]: expected int64 \[1, 6\]"),
    "positions-of-two-rows": ({"position_ids": wire(torch.zeros(2, 6, dtype=torch.long))}, r"expected int64 \[1, 6\]"),
    "fractional-positions": ({"position_ids": wire(torch.zeros(1, 6))}, "expected int64"),
    "negative-positions": ({"position_ids": wire(torch.arange(-1, 5)[None])}, "from -1 to 4 are outside"),
    "far-positions": ({"position_ids": wire(torch.arange(251, 257)[None])}, "from 251 to 256 are outside"),
    "positions-that-do-not-come": ({"position_ids": header(1, 6, dtype=pb.INT64, size_bytes=48)}, "only 0 of 48 bytes"),
}


def test_parts_of_a_refused_step_are_passed_over(target):
    too_long = target.step(hidden=header(1, POSITIONS + 1, HIDDEN))
    answer = target.client.session(target.open(), too_long, MORE, MORE, target.step(), CLOSE)
    assert answer.replies[1].failure.status == INVALID.value[0]
    assert_session_works(answer, target, 2)


@pytest.mark.parametrize("name", BAD_CONTEXT)
def test_masks_and_positions(target, name):
    fields, sentence = BAD_CONTEXT[name]
    answer = target.client.forward(pb.ForwardRequest(forward=target.forward(**fields)))
    assert (answer.replies, answer.status) == ([], INVALID)
    assert_one_sentence(answer.details, sentence)


@pytest.mark.parametrize("name", BAD_CONTEXT)
def test_masks_and_positions_of_a_step(target, name):
    fields, sentence = BAD_CONTEXT[name]
    answer = target.client.session(target.open(), target.step(**fields), target.step(), CLOSE)
    assert answer.replies[1].failure.status == INVALID.value[0]
    assert_one_sentence(answer.replies[1].failure.message, sentence)
    assert_session_works(answer, target, 2)


BAD_CONTRACTS = {
    "wire-version": (
        {"wire_version": WIRE_VERSION + 1},
        MOVED,
        "speaks wire version 1, the client 2: update the older",
    ),
    "revision": ({"revision": "other"}, MOVED, "at revision .*, the client expects .* at revision other"),
    "model": ({"model": "other"}, MOVED, "the client expects other at revision"),
    "blocks-before": ({"blocks": pb.Span(start=0, end=5)}, MOVED, "holds blocks 1:5, not 0:5"),
    "blocks-behind": ({"blocks": pb.Span(start=1, end=6)}, MOVED, "holds blocks 1:5, not 1:6"),
    "blocks-far-outside": ({"blocks": pb.Span(start=7, end=2**32 - 1)}, MOVED, "holds blocks 1:5, not 7:"),
    "no-blocks": ({"blocks": pb.Span(start=3, end=3)}, INVALID, "blocks 3:3 are no range of blocks"),
    "nothing-at-all": ({"blocks": None}, INVALID, "blocks 0:0 are no range of blocks"),
}


@pytest.mark.parametrize("name", BAD_CONTRACTS)
def test_contracts(target, name):
    fields, status, sentence = BAD_CONTRACTS[name]
    contract = target.contract(**fields)
    client, forward = target.client, target.forward(contract=contract)
    for answer in (
        client.forward(pb.ForwardRequest(forward=forward)),
        client.backward(pb.BackwardRequest(forward=forward)),
        client.session(target.open(contract=contract)),
    ):
        assert (answer.replies, answer.status) == ([], status)
        assert_one_sentence(answer.details, sentence)


def test_more_parts_than_announced(target):
    announced = pb.ForwardRequest(forward=target.forward(header(1, 1, HIDDEN)))
    answer = target.client.forward(announced, pb.ForwardRequest(more=bytes(200)), pb.ForwardRequest(more=bytes(57)))
    assert (answer.replies, answer.status) == ([], INVALID)
    assert_one_sentence(answer.details, "more than the announced 256 bytes")


def test_messages_out_of_turn(target):
    client, forward = target.client, target.forward()
    for answer, expected in (
        (client.forward(pb.ForwardRequest(more=b"1234")), "forward"),
        (client.forward(pb.ForwardRequest()), "forward"),
        (client.forward(pb.ForwardRequest(forward=target.forward(header(1, 1, HIDDEN))), pb.ForwardRequest()), "more"),
        (client.backward(pb.BackwardRequest(forward=forward), pb.BackwardRequest(forward=forward)), "grad"),
    ):
        assert (answer.replies, answer.status) == ([], INVALID)
        assert_one_sentence(answer.details, f"expected a message of kind '{expected}'")


@pytest.mark.parametrize(
    ("grad", "sentence"),
    [
        (wire(torch.zeros(1, TOKENS + 1, HIDDEN)), r"gradient has shape \[1, 7, 64\]: .* \[1, 6, 64\]"),
        (header(1, TOKENS, HIDDEN, dtype=pb.INT64), "expected float32, bfloat16 or float16"),
        (wire(filled(float("nan"))), "the gradients sent are not finite"),
    ],
    ids=["shape", "dtype", "nan"],
)
def test_gradients(target, grad, sentence):
    forward = pb.BackwardRequest(forward=target.forward())
    answer = target.client.backward(forward, pb.BackwardRequest(grad=grad))
    assert (answer.replies, answer.status) == ([], INVALID)
    assert_one_sentence(answer.details, sentence)


# ------------------------------------------------------------ sessions


def test_step_before_open(target):
    for request in (target.step(), MORE, pb.SessionRequest(crop=pb.Crop(length=0)), pb.SessionRequest()):
        answer = target.client.session(request)
        assert (answer.replies, answer.status) == ([], UNKNOWN)
        assert_one_sentence(answer.details, "does not know the session")


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"batch_size": 0}, INVALID, "batch size 0 is out of range"),
        ({"batch_size": 2**32 - 1}, INVALID, "batch size 4294967295 is out of range"),
        ({"reserve_tokens": ROOM + 1}, FULL, f"no room for {ROOM + 1} more tokens .* {ROOM} of {ROOM} are left"),
        ({"reserve_tokens": 21, "batch_size": 2}, FULL, f"no room for 42 more tokens .* {ROOM} of {ROOM} are left"),
        ({"reserve_tokens": POSITIONS + 1}, INVALID, f"257 positions are more than the model's {POSITIONS}"),
    ],
    ids=["no-rows", "too-many-rows", "no-room", "no-room-for-all-rows", "longer-than-the-model"],
)
def test_open(target, fields, status, sentence):
    answer = target.client.session(target.open(**fields))
    assert (answer.replies, answer.status) == ([], status)
    assert_one_sentence(answer.details, sentence)


def test_no_room_beside_another_session(target):
    """The first session holds 30 tokens, so that 10 are left; those are for whoever asks for no more."""
    first = target.client.session(target.open(reserve_tokens=30), target.step(), CLOSE)
    assert first.replies[0].opened.tokens_left == ROOM - 30
    with target.client.open_session(target.open(reserve_tokens=30)):
        answer = target.client.session(target.open(reserve_tokens=11))
        assert (answer.replies, answer.status) == ([], FULL)
        assert_one_sentence(answer.details, f"no room for 11 more tokens .* 10 of {ROOM} are left")
        assert_session_works(target.client.session(target.open(reserve_tokens=10), target.step(), CLOSE), target, 1)


def test_a_session_that_outgrows_the_room(target):
    long = torch.zeros(1, ROOM - TOKENS + 1, HIDDEN)
    answer = target.client.session(target.open(), target.step(), target.step(TOKENS, long), CLOSE)
    assert answer.replies[2].failure.status == FULL.value[0]
    assert_one_sentence(answer.replies[2].failure.message, f"no room for 35 more tokens .* 34 of {ROOM} are left")
    assert_session_works(answer, target, 1)


@pytest.mark.parametrize("start", [0, TOKENS - 1, TOKENS + 1, 2**63])
def test_step_at_another_position(target, start):
    last = target.hidden[:, :1]
    answer = target.client.session(target.open(), target.step(), target.step(start, last), target.step(6, last), CLOSE)
    assert answer.replies[2].failure.status == INVALID.value[0]
    assert_one_sentence(answer.replies[2].failure.message, f"begins at position {start}, but the session has {TOKENS}")
    assert answer.replies[3].WhichOneof("kind") == "output"
    assert_session_works(answer, target, 1)


def test_step_longer_than_the_model_in_all(target):
    """A position past the model's last one is refused even if there were room for it."""
    answer = target.client.session(
        target.open(), target.step(), target.step(6, header(1, POSITIONS - 5, HIDDEN)), CLOSE
    )
    assert answer.replies[2].failure.status == INVALID.value[0]
    assert_one_sentence(answer.replies[2].failure.message, f"257 positions are more than the model's {POSITIONS}")


NO_SESSION_LEFT = {
    "open-twice": (lambda target: [target.open()], "open already"),
    "nothing": (lambda target: [pb.SessionRequest()], "unknown kind"),
    "reorder-out-of-range": (
        lambda target: [pb.SessionRequest(reorder=pb.Reorder(indices=[0, 1]))],
        "takes row 1 of a session that has 1 rows",
    ),
    "reorder-to-nothing": (lambda target: [pb.SessionRequest(reorder=pb.Reorder())], "batch size 0 is out of range"),
    "crop-to-more": (
        lambda target: [pb.SessionRequest(crop=pb.Crop(length=TOKENS + 1))],
        "cannot crop 6 positions to 7",
    ),
    "part-without-beginning": (lambda target: [MORE], "without its beginning"),
    "step-inside-a-step": (
        lambda target: [target.step(6, header(1, 1, HIDDEN)), target.step(6)],
        "before all parts of the one before it",
    ),
    "more-parts-than-announced": (
        lambda target: [target.step(6, header(1, 1, HIDDEN)), pb.SessionRequest(more=bytes(257))],
        "more than the announced 256 bytes",
    ),
}


@pytest.mark.parametrize("name", NO_SESSION_LEFT)
def test_requests_that_end_a_session(target, name):
    """There is no telling what the client believes the session to be after these."""
    requests, sentence = NO_SESSION_LEFT[name]
    answer = target.client.session(target.open(), target.step(), *requests(target))
    assert torch.equal(decode(answer.replies[1].output), target.expected)
    assert (len(answer.replies), answer.status) == (2, INVALID)
    assert_one_sentence(answer.details, sentence)


def test_reorder_and_crop_of_an_empty_session(target):
    """Nothing to do, and nothing to complain of."""
    answer = target.client.session(
        target.open(),
        pb.SessionRequest(reorder=pb.Reorder(indices=[0])),
        pb.SessionRequest(crop=pb.Crop(length=0)),
        target.step(),
        CLOSE,
    )
    assert_session_works(answer, target, 1)
