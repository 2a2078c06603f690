"""Gradients of an adapter are summed on servers and travel once; an adapter that did not change travels once, too."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from swarm_client.transport.transport import ServerConnection
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.rpc import passes
from tests.swarm.adapter_target import HOSTED, OK, Target, adapter_target, random, tensors
from tests.swarm.raw_client import Answer, RawClient
from tests.swarm.target import INVALID, assert_refused, wire
from tests.swarm.tuning import assert_close, lora, loss_of, padded_batch, tuned
from tests.zoo import HIDDEN

SPANS = ("0:2", "2:6")

FORGOTTEN = grpc.StatusCode.ABORTED
NUM_PASSES = 4
PASSES = [(random(2, 6, HIDDEN, seed=n), random(2, 6, HIDDEN, seed=10 + n)) for n in range(NUM_PASSES)]


def new_key() -> bytes:
    return secrets.token_bytes(16)


# ------------------------------------------------------------ over the wire


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("sums")
    with adapter_target(directory, chunk_tokens=32, adapters=(directory / "poet",)) as target:
        yield target


@pytest.fixture(scope="module")
def name(target) -> pb.AdapterName:
    return target.put(target.local.adapter(HOSTED, salt=new_key()))


def go_back(
    target: Target, name: pb.AdapterName | None, number: int, summand: pb.Summand, kept: bool = False
) -> Answer:
    hidden, grad = PASSES[number]
    first = pb.BackwardRequest(forward=target.forward(hidden, name), summand=summand)
    if kept:
        key = new_key()
        target.kept_output(key, hidden, name)
        first = pb.BackwardRequest(kept=pb.KeptForward(contract=target.contract(), key=key), summand=summand)
    return target.client.backward(first, pb.BackwardRequest(grad=wire(grad)))


def take(target: Target, key: bytes, *numbers: int, client: RawClient | None = None) -> Answer:
    request = pb.TakeSum(contract=target.contract(), key=key, numbers=numbers)
    return (client or target.client).backward(pb.BackwardRequest(take_sum=request))


def summed(target: Target, name: pb.AdapterName, *numbers: int) -> list[torch.Tensor]:
    """Of gradients that travel one by one, in this order."""
    sums: list[torch.Tensor] = []
    for number in numbers:
        _, *grads = target.gradients(*PASSES[number], name)
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else grads
    return sums


@pytest.mark.parametrize(
    ("order", "kept"),
    [((0, 1, 2, 3), False), ((3, 1, 0, 2), False), ((3, 1, 0, 2), True), ((2, 3, 1), True), ((1,), False)],
)
def test_the_sum_is_that_in_the_order_of_numbers(target, name, order, kept):
    key = new_key()
    for number in order:
        answer = go_back(target, name, number, pb.Summand(key=key, number=number), kept)
        (hidden_grad,) = tensors(answer)
        assert answer.status is OK and answer.replies[0].summed
        assert_close(hidden_grad, target.gradients(*PASSES[number], name)[0])
    found = tensors(take(target, key, *sorted(order)))
    assert found and all(map(torch.equal, found, summed(target, name, *sorted(order))))
    again = take(target, key, *sorted(order))
    assert_refused(again, FORGOTTEN, "does not have the sum")


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2), (0, 2), ()], ids=str)
def test_a_sum_of_other_passes_is_not_handed_over(target, name, numbers):
    key = new_key()
    for number in (0, 1):
        go_back(target, name, number, pb.Summand(key=key, number=number))
    answer = take(target, key, *numbers)
    assert_refused(answer, FORGOTTEN, "has added other passes")


def test_without_gradients_of_an_adapter_nothing_is_summed(target):
    for adapter in (None, pb.AdapterName(name="poet")):
        key = new_key()
        answer = go_back(target, adapter, 0, pb.Summand(key=key))
        assert answer.status is OK and not answer.replies[0].summed
        assert take(target, key, 0).status is FORGOTTEN


@pytest.mark.parametrize(
    ("summand", "sentence"),
    [
        (pb.Summand(key=bytes(5)), "key of a sum has 5 bytes: expected 16 to 64"),
        (pb.Summand(key=bytes(16), number=4096), "pass 4096 of a sum: expected a number below 4096"),
    ],
    ids=["key", "number"],
)
def test_summands_that_are_refused(target, name, summand, sentence):
    first = pb.BackwardRequest(forward=target.forward(PASSES[0][0], name), summand=summand)
    answer = target.client.backward(first)  # refused before there is a gradient
    assert_refused(answer, INVALID, sentence)


def test_a_sum_is_one_over_the_same_tensors(target, name):
    key, other = new_key(), target.local.adapter(HOSTED, salt=new_key())
    half = target.put(type(other)(other.salt, other.low_rank[:2]))
    go_back(target, name, 0, pb.Summand(key=key, number=0))
    answer = go_back(target, half, 1, pb.Summand(key=key, number=1))
    assert_refused(answer, INVALID, "the sum is one of other tensors")
    request = pb.TakeSum(contract=target.contract(), key=key, numbers=[0])
    request.contract.blocks.end -= 1
    assert target.client.backward(pb.BackwardRequest(take_sum=request)).status is INVALID
    assert all(map(torch.equal, tensors(take(target, key, 0)), summed(target, name, 0)))


# ------------------------------------------------------------ a client's


class Traffic:
    """Bytes of adapters that servers are given, and of what they answer backward passes with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uploads: list[int] = []
        self.answers: list[int] = []
        backward, put = passes.backward, ServerConnection._put

        async def answering(*arguments):
            replies = await backward(*arguments)
            self.answers.append(sum(reply.ByteSize() for reply in replies))
            return replies

        async def putting(server: ServerConnection, data: bytes, span) -> None:
            self.uploads.append(len(data))
            await put(server, data, span)

        monkeypatch.setattr(passes, "backward", answering)
        monkeypatch.setattr(ServerConnection, "_put", putting)

    def clear(self) -> None:
        self.uploads, self.answers = [], []


@pytest.fixture
def traffic(monkeypatch) -> Traffic:
    return Traffic(monkeypatch)


NUM_SERVERS, MICRO_BATCHES = 2, 6
BATCH = padded_batch(rows=12, tokens=40)  # two rows are a micro-batch


def assert_same_gradients(pair, between: Callable[[], object] = lambda: None) -> None:
    for model, action in zip(pair.models, (lambda: None, between), strict=True):
        model.zero_grad()
        loss = loss_of(**BATCH)(model)
        action()
        loss.backward()
    for local, remote in zip(*pair.parameters, strict=True):
        assert local.grad.abs().max() > 0
        assert_close(remote.grad, local.grad)


@pytest.mark.promise("an adapter and its gradients travel once in a step")
def test_an_adapter_and_its_gradients_travel_once_in_a_step(servers, traffic):
    with tuned(servers, lora()) as pair:
        pair.train(1, loss_of(**BATCH))
        traffic.clear()
        assert_same_gradients(pair)
        weights = sum(parameter.nbytes for parameter in pair.parameters[1])
        hidden = MICRO_BATCHES * 2 * 40 * HIDDEN * 4
        assert len(traffic.answers) == NUM_SERVERS * (MICRO_BATCHES + 1)
        # the gradients that enter the second server's blocks go back to the first; nobody wants those of the embeddings
        assert sum(traffic.answers) < 1.1 * (NUM_SERVERS * hidden + weights)
        assert sum(traffic.answers) > NUM_SERVERS * hidden + weights
        assert len(traffic.uploads) == NUM_SERVERS and weights < sum(traffic.uploads) < 1.1 * weights


def test_an_adapter_that_did_not_change_is_not_sent_again(servers, traffic):
    with tuned(servers, lora(lora_dropout=0.1)) as pair:
        for mode in (True, False):  # a step's micro-batches, and an evaluation
            model = pair.remote.train(mode)
            loss_of(**BATCH)(model).backward()
            with torch.no_grad():
                loss_of(**padded_batch())(model)
            model.generate(BATCH["input_ids"][1:2, :8], max_new_tokens=2, do_sample=False)
        assert len(traffic.uploads) == NUM_SERVERS
        torch.optim.SGD(pair.parameters[1], lr=0.1).step()
        for _ in range(2):
            loss_of(**BATCH)(pair.remote).backward()
        assert len(traffic.uploads) == 2 * NUM_SERVERS


def test_sums_that_servers_forget_are_computed_again(servers, monkeypatch):
    take_sum, forgotten = ServerConnection.take_sum, []

    async def forgetting(server: ServerConnection, span, request, adapter):
        forgotten.append(await take_sum(server, span, request, adapter))  # which is then not there any more
        return await take_sum(server, span, request, adapter)

    monkeypatch.setattr(ServerConnection, "take_sum", forgetting)
    with tuned(servers, lora()) as pair:
        pair.train(1, loss_of(**BATCH))
        forgotten.clear()
        assert_same_gradients(pair)
    assert len(forgotten) == NUM_SERVERS


def test_servers_that_know_of_no_sums(servers, monkeypatch):
    """Older ones skip the field, and answer as they always have."""
    backward, answers = passes.backward, []

    async def older(services, client, incoming, request):
        first = incoming.first

        async def reading(*kinds):
            message = await first(*kinds)
            message.ClearField("summand")
            return message

        incoming.first = reading
        replies = await backward(services, client, incoming, request)
        answers.append(len(replies))
        return replies

    monkeypatch.setattr(passes, "backward", older)
    with tuned(servers, lora()) as pair:
        pair.train(1, loss_of(**BATCH))
        answers.clear()
        assert_same_gradients(pair)
    assert len(answers) == NUM_SERVERS * MICRO_BATCHES and min(answers) > 1
