"""A group computes what one server computes, bit for bit; a member that is missing ends it with a sentence."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.kernels.int4_linear import KernelInt4Weight, quantize_groups
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import Packed, quantize_
from swarm_protocol.errors import CheckpointError
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import SessionStep
from swarm_server.group import links, members
from swarm_server.group.handshake import HandshakeFailed
from swarm_server.group.links import Deal, GroupEnded, LeaderLinks, LinkEnds, MemberLink, MemberRequest
from swarm_server.group.members import LoadSign, MemberWatch, follow, formed_links, load_together
from swarm_server.group.split_weight import GRADIENT, SplitWeight, answer
from swarm_server.kv.kv_cache import CacheBudget
from tests.adapted import LocalModel
from tests.marks import LONG, SLOW
from tests.unit.server.session_outputs import session_outputs
from tests.zoo import ALIKE, SUPPORTED, doubled_widths, save_checkpoint

pytestmark = pytest.mark.skipif(links.library() is None, reason="no compiled kernel")

CPU = torch.device("cpu")
SPAN = Span(1, 4)  # where each family has blocks of all its kinds
# Fused and single layers, experts, windows, states; tests below have llama and mixtral.
OFTEN = {"int8": ("deepseek_v32", "qwen3_next", "gemma3_text", "mamba2"), "int4": ("gpt2", "gpt_oss")}
INT4 = ("gpt2", "gpt_oss", "deepseek_v32", "qwen3_next")


def tier_of(family: str, quant: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a family: those with blocks like another's are long, and int4 splits rows as int8 does."""
    if family in ALIKE:
        return (LONG,)
    if family in OFTEN[quant]:
        return ()
    return (SLOW,) if quant == "int8" or family in INT4 else (LONG,)


def saved(family: str, directory: Path, seed: int = 0) -> Path:
    save_checkpoint(family, directory, max_shard_size="1GB", seed=seed, **doubled_widths(family))
    return directory


def loader(directory: Path, quant: str) -> Callable:
    def load(span: Span, then: Callable[[torch.nn.Module], None] = lambda _module: None) -> BlockStack:
        def transform(block: torch.nn.Module, _index: int) -> None:
            quantize_(block, quant, CPU, torch.float32, int8_weight=KernelWeight)
            then(block)

        return load_blocks(ModelCheckpoint.open(directory), span, transform=transform)

    return load


@contextmanager
def followers(
    load: Callable, speeds: Sequence[float] = (1.0, 1.0), kind: str = "memory", refusals: list[str] | None = None
) -> Iterator[LeaderLinks]:
    """Followers in threads, beside the leader's links to them. ``refusals`` gets the reasons that a leader gives."""
    leader_ends, threads = [], []
    for _ in speeds[1:]:
        ends = LinkEnds.on_this_machine()
        memory = ends.memory.fileno() if kind == "memory" else None
        if kind != "memory":
            with socket.create_server(("127.0.0.1", 0)) as server:
                mine = socket.create_connection(server.getsockname())
                ends = LinkEnds(mine, server.accept()[0], ends.memory)
        leader_ends.append(MemberLink(ends.leader, memory, 0))
        theirs = MemberLink(ends.follower, memory, 1)
        if kind == "sealed":
            leader_ends[-1].seal(bytes(32), bytes(range(32)))
            theirs.seal(bytes(range(32)), bytes(32))
        threads.append(threading.Thread(target=_follow, args=(load, theirs, refusals)))
        threads[-1].start()
    group = formed_links(leader_ends, Deal.by_speed(speeds))
    try:
        yield group
    finally:
        group.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def _follow(load: Callable, link: MemberLink, refusals: list[str] | None) -> None:
    try:
        with suppress(CheckpointError):
            follow(load, link)
    except HandshakeFailed as error:
        if refusals is None:
            raise
        refusals.append(str(error))
    link.close()  # as when its process ends


@pytest.mark.parametrize(
    ("family", "speeds", "kind", "quant"),
    [
        ("llama", (3.0, 1.0, 2.0), "memory", "int8"),
        ("llama", (1.0, 2.0), "sealed", "int4"),
        pytest.param("mixtral", (1.0, 1.0), "tcp", "int8", marks=SLOW),
        pytest.param("llama", (1.0, 1.0, 1.0), "sealed", "int8", marks=SLOW),
        pytest.param("qwen3_next", (1.0, 1.0, 5.0), "memory", "int4", marks=SLOW),
    ],
)
def test_outputs_are_those_of_one_server(
    family: str, speeds: tuple[float, ...], kind: str, quant: str, tmp_path: Path
) -> None:
    compare_with_one_server(saved(family, tmp_path), quant, speeds, kind)


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        pytest.param(name, quant, marks=tier_of(name, quant))
        for quant in ("int8", "int4")
        for name in SUPPORTED
        if quant == "int8" or name not in ALIKE
    ],
)
def test_outputs_of_every_family_are_those_of_one_server(family: str, quant: str, tmp_path: Path) -> None:
    compare_with_one_server(saved(family, tmp_path), quant)


def compare_with_one_server(
    directory: Path, quant: str, speeds: tuple[float, ...] = (1.0, 1.0), kind: str = "memory"
) -> None:
    load = loader(directory, quant)
    alone = Engine(load(SPAN))
    with torch.inference_mode(), followers(load, speeds, kind) as group:
        together = Engine(load_together(group, SPAN, load))
        layers = [module for module in together._stack.modules() if isinstance(module, QuantizedLinear)]
        split = [layer.out_features for layer in layers if isinstance(layer.quantized, SplitWeight)]
        assert split == [layer.out_features for layer in layers if layer.out_features > 64 * (len(speeds) - 1)]
        assert len(split) >= 2 * len(SPAN)
        assert (together.ways.graphs is None) == (alone.ways.graphs is None)
        for ours, theirs in zip(session_outputs(together, SPAN), session_outputs(alone, SPAN), strict=True):
            assert torch.equal(ours, theirs)
        assert len(group.times_s()) == len(speeds) and min(group.times_s()) > 0


@pytest.mark.parametrize(
    ("family", "quant", "targets"),
    [
        ("llama", "int8", ["q_proj", "down_proj"]),
        ("mixtral", "int8", ["q_proj", "o_proj"]),
        ("qwen3_next", "int8", ["in_proj_qkvz", "out_proj", "q_proj"]),
        pytest.param("llama", "int4", ["q_proj", "down_proj"], marks=SLOW),
    ],
)
def test_passes_with_an_adapter_and_their_gradients_are_those_of_one_server(
    family: str, quant: str, targets: list[str], tmp_path: Path
) -> None:
    load = loader(saved(family, tmp_path), quant)
    adapter = LocalModel.load(tmp_path, r=4, target_modules=targets).adapter(SPAN)
    hidden, grad = torch.randn(2, 3, 128), torch.randn(2, 3, 128)

    def passed(engine: Engine) -> tuple[torch.Tensor, ...]:
        placed = engine.place(b"key", adapter)
        output = engine.stateless.forward(SPAN, BlockInput(hidden.clone()), placed)
        return output, *engine.stateless.backward(SPAN, BlockInput(hidden.clone()), grad, placed, trains_adapter=True)

    alone = Engine(load(SPAN))
    with followers(load) as group:
        together = Engine(load_together(group, SPAN, load))
        (output, *gradients), (expected_output, *expected) = passed(together), passed(alone)
        assert torch.equal(output, expected_output)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert (ours - theirs).abs().max() <= 2e-3 * theirs.abs().max()  # gradients have 14 bits
        weight, whole = (
            next(module.quantized for module in engine._stack.modules() if hasattr(module, "quantized"))
            for engine in (together, alone)
        )
        assert isinstance(weight, SplitWeight) and torch.equal(weight.dequantize(), whole.dequantize())


def weights(quant: str) -> Packed:
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
    if quant == "int8":
        return KernelWeight(*quantize_rows(weight))
    return KernelInt4Weight(*quantize_groups(weight))


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (1e9, 1.0), (1.0, 1e9, 1.0)])
def test_rows_are_split_into_whole_strips(quant: str, speeds: tuple[float, ...]) -> None:
    whole, x, deal = weights(quant), torch.randn(3, 96), Deal.by_speed(speeds)
    rows = [deal.rows_of(200, member) for member in range(len(speeds))]
    assert [0, *(each.stop for each in rows)] == [*(each.start for each in rows), 200]
    assert all(each.start % 64 == 0 and each.stop > each.start for each in rows)
    parts = [whole.part(each).matmul(x) for each in rows]
    assert torch.equal(torch.cat(parts, 1), whole.matmul(x))
    assert deal.rows_of(64, 0) == slice(0, 64) and deal.rows_of(64, 1) == slice(64, 64)  # too few rows for two members


def test_rows_are_dealt_in_proportion_to_speed() -> None:
    deal = Deal.by_speed([3e9, 1e9, 4e9])
    assert deal.shares == [0.375, 0.125, 0.5]
    assert [deal.rows_of(64 * 80, member) for member in range(3)] == [
        slice(0, 64 * 30),
        slice(64 * 30, 64 * 40),
        slice(64 * 40, 64 * 80),
    ]


def test_a_member_that_ends() -> None:
    ends = LinkEnds.on_this_machine()
    group = LeaderLinks([MemberLink(ends.leader, ends.memory.fileno(), 0)], Deal.by_speed([1.0, 1.0]))
    ends.follower.close()
    with pytest.raises(GroupEnded, match="a member of the group has ended"):
        SplitWeight(0, weights("int8"), group).matmul(torch.randn(1, 96))
    group.close()


def test_what_a_member_has_sent_before_it_ends_arrives() -> None:
    """Also at one that has waited for so long that it sleeps until the socket tells it of the end."""
    sent, pairs = torch.arange(1000.0), []
    for _ in range(20):
        ends = LinkEnds.on_this_machine()
        pairs.append(
            (MemberLink(ends.leader, ends.memory.fileno(), 0), MemberLink(ends.follower, ends.memory.fileno(), 1))
        )
    received = [torch.zeros(1000) for _ in pairs]
    with ThreadPoolExecutor(len(pairs)) as threads:
        receiving = [threads.submit(pair[1].receive, each) for pair, each in zip(pairs, received, strict=True)]
        time.sleep(0.3)  # with less, they might not sleep yet, which is easier
        for leader, _ in pairs:
            leader.send(sent)
            leader.close()
        for each in receiving:
            each.result()
    assert all(torch.equal(each, sent) for each in received)


def test_answers_that_come_too_late_are_not_taken_for_others() -> None:
    """A gradient that has not come in time ends the group: it may come before that of the next request."""
    ends = LinkEnds.on_this_machine()
    group = LeaderLinks([MemberLink(ends.leader, ends.memory.fileno(), 0, limit_s=0.05)], Deal.by_speed([1.0, 1.0]))
    late, weight = MemberLink(ends.follower, ends.memory.fileno(), 1), SplitWeight(0, weights("int8"), group)
    with pytest.raises(GroupEnded, match="has not answered for"):
        weight.matmul_grad(torch.randn(1, 200))
    late.send(torch.randn(1, 96))
    assert group.failure is not None
    for work in (lambda: weight.matmul(torch.randn(1, 96)), weight.dequantize):
        with pytest.raises(GroupEnded, match="has not answered for"):
            work()


def test_long_passes_are_many_requests_to_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members wait for ten seconds for an answer, and a training pass has thousands of positions."""
    whole, requests = weights("int8"), []
    own = links.OwnWeights([whole.part(Deal.by_speed([1.0, 1.0]).rows_of(200, 1))])
    ask, multiply = MemberLink.ask, LeaderLinks.matmul

    def noted_ask(link: MemberLink, request: MemberRequest) -> None:
        requests.append(request.rows)
        ask(link, request)

    def noted_multiply(group: LeaderLinks, number: int, x: torch.Tensor, *more: object) -> None:
        requests.append(len(x))
        multiply(group, number, x, *more)

    monkeypatch.setattr(MemberLink, "ask", noted_ask)
    monkeypatch.setattr(LeaderLinks, "matmul", noted_multiply)
    x, grad = torch.randn(600, 96), torch.randn(600, 200)

    def serve(link: MemberLink) -> None:
        with suppress(GroupEnded):
            while True:
                answer(link.follow(own), own, link)

    ends = LinkEnds.on_this_machine()
    group = LeaderLinks([MemberLink(ends.leader, ends.memory.fileno(), 0)], Deal.by_speed([1.0, 1.0]))
    thread = threading.Thread(target=serve, args=(MemberLink(ends.follower, ends.memory.fileno(), 1),))
    thread.start()
    weight = SplitWeight(0, whole, group)
    assert torch.equal(weight.matmul(x), whole.matmul(x))
    expected = whole.matmul_grad(grad)
    assert (weight.matmul_grad(grad) - expected).abs().max() <= 2e-3 * expected.abs().max()
    assert requests == 2 * [256, 256, 88]
    group.close()
    thread.join()


def fail(*_arguments: object) -> None:
    raise CheckpointError("the file is gone\nand more")


def test_a_span_that_the_leader_cannot_load_leaves_the_group_as_it_was(tmp_path: Path) -> None:
    load = loader(saved("llama", tmp_path), "int8")
    with followers(load) as group:
        with pytest.raises(CheckpointError, match="the file is gone"):
            load_together(group, Span(4, 6), fail)
        assert load_together(group, SPAN, load).span == SPAN


def test_a_span_that_no_member_can_load_fails_with_the_error_of_the_leader() -> None:
    """A group that had ended would be formed again, and nobody would learn why it ends each time."""
    with followers(fail) as group:
        with pytest.raises(CheckpointError, match="the file is gone"):
            load_together(group, SPAN, fail)
        assert group.failure is not None


def test_a_follower_that_cannot_load_says_why() -> None:
    with followers(fail) as group:
        with pytest.raises(GroupEnded, match=r"a member of the group cannot load blocks 1:4: the file is gone$"):
            load_together(group, SPAN, lambda *_: None)
        assert group.failure is not None


@pytest.mark.parametrize("request_", [MemberRequest(7), MemberRequest(GRADIENT, 1, number=3)])
def test_a_follower_ends_the_group_if_it_does_not_understand_the_leader(
    request_: MemberRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), followers(fail) as group:
        group.links[0].ask(request_)
        with pytest.raises(GroupEnded, match="a member of the group has ended"):
            group.links[0].receive(torch.empty(1))
    assert f"kind {request_.wanted} and weight {request_.number}, which is not understood" in caplog.text


def test_a_follower_without_memory_ends_with_a_message() -> None:
    def load(*_arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nFrames: …")

    sent: list[torch.Tensor] = []
    link: Any = SimpleNamespace(send=sent.append)
    with pytest.raises(ValueError, match=r"no memory for this member's rows of blocks 1:4: Default.* 9 bytes\.$"):
        members._loaded(load, SPAN, link, members._Place(1, Deal.by_speed([1.0, 1.0])))
    assert sent[0].tolist()[0] == LoadSign.FAILED and bytes(sent[1].tolist()).startswith(b"DefaultCPUAllocator")


def test_the_leader_gives_up_a_follower_that_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SIGN_S", 0.01)
    monkeypatch.setattr(members, "_STUCK_S", 0.1)
    hangs = threading.Event()
    with followers(lambda *_: hangs.wait()) as group:
        with pytest.raises(GroupEnded, match=r"cannot load blocks 1:4: it is alive, but has loaded nothing more for"):
            load_together(group, SPAN, lambda *_: None)
        hangs.set()


def test_the_leader_gives_up_a_follower_without_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SILENT_S", 0.05)
    ends = LinkEnds.on_this_machine()
    group = LeaderLinks([MemberLink(ends.leader, ends.memory.fileno(), 0)], Deal.by_speed([1.0, 1.0]))
    refused = r"cannot load blocks 1:4: a member of the group has not answered for 0\.05 seconds"
    with pytest.raises(GroupEnded, match=refused):
        load_together(group, SPAN, lambda *_: None)
    group.close()


class LoadingLink:
    """Stands for the link to a follower that loads, whose messages come at these times."""

    def __init__(self, messages: Sequence[tuple[float, Sequence[int]]]) -> None:
        self._messages, self._now_s = iter(messages), 0.0

    def clock(self) -> float:
        return self._now_s

    def limit(self, _limit_s: float = 0.0) -> None:
        pass

    def receive(self, tensor: torch.Tensor) -> None:
        self._now_s, numbers = next(self._messages)
        tensor.copy_(torch.tensor(numbers))


def test_the_leader_waits_for_a_follower_as_long_as_it_makes_progress() -> None:
    stuck_s, digest = members._STUCK_S, range(32)
    loading = [(number * 0.9 * stuck_s, (LoadSign.LOADING, number)) for number in range(20)]
    slow = LoadingLink([*loading, (1e6, (LoadSign.LOADED, 0)), (1e6, digest)])
    assert members._received_digest(slow, slow.clock) == bytes(digest)
    stuck = LoadingLink([(0.0, (LoadSign.LOADING, 7)), (1.1 * stuck_s, (LoadSign.LOADING, 7))])
    with pytest.raises(GroupEnded, match="has loaded nothing more for 300 seconds"):
        members._received_digest(stuck, stuck.clock)


@pytest.mark.parametrize(("family", "end"), [("llama", 300), ("qwen3_next", 12)])  # so many are no decode steps
def test_a_member_that_dies_in_the_middle_of_a_prompt_leaves_sessions_as_they_were(
    family: str, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are handed over to another server, which goes on with the same bits."""
    load = loader(saved(family, tmp_path), "int8")
    hidden, multiply, left = torch.randn(1, end, 128), LeaderLinks.matmul, iter(range(4))

    def dies(group: LeaderLinks, *arguments: object) -> None:
        if next(left, None) is None:
            group.close()
        multiply(group, *arguments)

    def step(start: int, end: int) -> SessionStep:
        return SessionStep(start, BlockInput(hidden[:, start:end]))

    with followers(load, kind="tcp") as group:
        alone, together, budget = Engine(load(SPAN)), Engine(load_together(group, SPAN, load)), CacheBudget(1 << 40, 1)
        whole, session, copy = (engine.open(SPAN, 1, budget.lease("")) for engine in (alone, together, alone))
        (first,), (_,) = together.run([(session, step(0, 7))]), alone.run([(whole, step(0, 7))])
        room = budget.tokens_left
        monkeypatch.setattr(LeaderLinks, "matmul", dies)
        with pytest.raises(GroupEnded, match="a member of the group has ended"):
            together.run([(session, step(7, end))])
        assert session.length == 7 and budget.tokens_left == room
        alone.adopt(copy, 0, (), together.stored(session, 0, 7))
    assert isinstance(first, torch.Tensor)
    (ours,), (theirs,) = alone.run([(copy, step(7, end))]), alone.run([(whole, step(7, end))])
    assert torch.equal(ours, theirs)


def test_a_model_without_rows_for_all_members_is_refused(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, intermediate_size=64)
    load = loader(tmp_path, "int8")
    refused = pytest.raises(ValueError, match="no linear layer of blocks 1:4 has 64 rows for each of 2 members")
    with followers(load) as group, refused:
        load_together(group, SPAN, load)


def test_a_slow_follower_is_noticed_after_six_windows() -> None:
    seconds, windows = itertools.count(0, 5), itertools.count()
    slow = SimpleNamespace(
        members=2, deal=Deal.by_speed([1.0, 1.0]), times_s=lambda: [float(number := next(windows)), 3.0 * number]
    )
    watch = MemberWatch(slow, lambda: float(next(seconds)))
    looks = [watch.look() for _ in range(6)]
    assert looks == [None] * 5 + [1]


def test_members_with_other_weights_are_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        saved("llama", tmp_path / str(seed), seed)
    refusals: list[str] = []
    refused = pytest.raises(GroupEnded, match="has loaded other weights than the leader")
    with followers(loader(tmp_path / "1", "int8"), refusals=refusals) as group, refused:
        load_together(group, SPAN, loader(tmp_path / "0", "int8"))
    assert refusals == ["this member has loaded other weights than the leader"]
