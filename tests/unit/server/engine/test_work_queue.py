"""Whose turn it is: nobody starves, decoding waits least, and what fits together is computed together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.session_state import SessionStep
from swarm_server.engine.work_queue import MAX_POSITIONS, WorkItem, WorkKind, WorkQueue


def work(kind: WorkKind = WorkKind.DECODE, num_tokens: int = 1, rows: int = 1) -> WorkItem:
    """A step of a session of its own."""
    return WorkItem(
        kind, deliver=print, session=object(), step=SessionStep(0, BlockInput(torch.zeros(rows, num_tokens, 1)))
    )


def call(kind: WorkKind) -> WorkItem:
    return WorkItem(kind, deliver=print, call=lambda: None)


CHUNK = 64  # positions


def filled(*works: WorkItem, mixes_sessions: bool = True) -> WorkQueue:
    queue = WorkQueue(mixes_sessions, CHUNK)
    for one in works:
        queue.add(one)
    return queue


def num_waiting(queue: WorkQueue, kind: WorkKind) -> int:
    return len(queue._waiting[kind])


def batches(queue: WorkQueue) -> list[list[WorkItem]]:
    """Everything, in the order of its computation."""
    result = []
    while batch := queue.next_batch():
        result.append(batch)
    return result


class TestTurns:
    def test_decoding_has_every_other_turn(self) -> None:
        others = [work(WorkKind.PREFILL, CHUNK) for _ in range(6)] + [call(WorkKind.TRAINING) for _ in range(3)]
        queue, kinds = filled(*others), []
        for _ in range(16):
            for _ in others:
                queue.add(work())
            kinds.append(queue.next_batch()[0].kind)
        assert [kind for kind in kinds[::2]] == [WorkKind.DECODE] * 8
        assert WorkKind.DECODE not in kinds[1::2]

    def test_decoding_has_every_ninth_turn_while_more_prompts_than_steps_wait(self) -> None:
        queue, kinds = filled(*(work(WorkKind.PREFILL, CHUNK) for _ in range(10))), []
        for _ in range(14):
            if not num_waiting(queue, WorkKind.DECODE):
                queue.add(work())
            kinds.append(queue.next_batch()[0].kind)
        decode, prefill = WorkKind.DECODE, WorkKind.PREFILL
        assert kinds == [decode, *[prefill] * 8] + [decode, prefill] * 2 + [decode]

    def test_short_calls_do_not_use_up_the_turns_of_decoding_steps(self) -> None:
        """Prompts go on though calls come without end: they wait for eight of them at most."""
        calls = [call(WorkKind.DECODE) for _ in range(30)]
        queue = filled(*(work(WorkKind.PREFILL, CHUNK) for _ in range(100)), *calls[:7], work(), *calls[7:])
        kinds = ["call" if batch[0].step is None else batch[0].kind.name for batch in batches(queue)]
        assert kinds[:8] == ["call"] * 7 + ["DECODE"]
        assert kinds[8:] == (["PREFILL"] * 8 + ["call"] * 8) * 2 + ["PREFILL"] * 8 + ["call"] * 7 + ["PREFILL"] * 76

    def test_training_has_one_in_four_of_the_turns_that_decoding_leaves(self) -> None:
        queue, kinds = filled(*(call(WorkKind.TRAINING) for _ in range(4))), []
        for _ in range(16):
            queue.add(work(WorkKind.PREFILL))
            kinds.append(queue.next_batch()[0].kind)
        assert kinds == ([WorkKind.PREFILL] * 3 + [WorkKind.TRAINING]) * 4

    @pytest.mark.parametrize("kind", [WorkKind.DECODE, WorkKind.PREFILL, WorkKind.TRAINING])
    def test_background_work_has_one_in_eight_of_the_turns_of_others(self, kind: WorkKind) -> None:
        queue, kinds = filled(*(work(WorkKind.BACKGROUND) for _ in range(9)), mixes_sessions=False), []
        for _ in range(24):
            queue.add(work(kind))
            kinds.append(queue.next_batch()[0].kind)
        assert kinds == ([kind] * 7 + [WorkKind.BACKGROUND]) * 3

    def test_whoever_is_alone_has_all_turns(self) -> None:
        for kind in WorkKind:
            works = [call(kind) for _ in range(4)]
            assert batches(filled(*works)) == [[one] for one in works]

    def test_a_prompt_goes_before_the_training_that_came_before_it(self) -> None:
        queue = filled(*(call(WorkKind.TRAINING) for _ in range(9)))
        for _ in range(4):
            queue.next_batch()
        queue.add(work(WorkKind.PREFILL))
        assert queue.next_batch()[0].kind is WorkKind.PREFILL

    @given(st.lists(st.sampled_from(list(WorkKind)), max_size=40), st.randoms(use_true_random=False))
    def test_nobody_starves(self, arrivals: list[WorkKind], chance: random.Random) -> None:
        queue, waited = WorkQueue(mixes_sessions=False), dict.fromkeys(WorkKind, 0)
        for kind in arrivals:
            for _ in range(chance.randrange(3)):
                queue.add(work(kind))
            waiting = [kind for kind in WorkKind if num_waiting(queue, kind)]
            if not waiting:
                continue
            served = queue.next_batch()[0].kind
            for kind in WorkKind:
                waited[kind] = waited[kind] + 1 if kind in waiting and kind is not served else 0
            assert max(waited.values()) < 10 and waited[WorkKind.DECODE] < 9


class TestBatches:
    def test_unless_the_model_does_not_mix_rows(self) -> None:
        works = [work() for _ in range(3)]
        assert batches(filled(*works, mixes_sessions=False)) == [[one] for one in works]

    def test_short_prompts_of_equal_length_come_together_as_long_as_decoding_can_wait(self) -> None:
        short = [work(WorkKind.PREFILL, num_tokens=16) for _ in range(9)]
        at_once = CHUNK // 16
        assert batches(filled(*short)) == [short[:at_once], short[at_once : 2 * at_once], short[2 * at_once :]]
        long, one, other = works = [work(WorkKind.PREFILL, num_tokens=length) for length in (CHUNK, 1, 2)]
        assert batches(filled(*works)) == [[one], [other], [long]]

    def test_calls_are_alone(self) -> None:
        first, between, last = work(), call(WorkKind.DECODE), work()
        assert batches(filled(first, between, last)) == [[first, last], [between]]

    def test_have_so_many_positions_and_no_more(self) -> None:
        works = [work(rows=8) for _ in range(MAX_POSITIONS // 8 + 2)]
        assert batches(filled(*works)) == [works[:-2], works[-2:]]
        longer = [work(num_tokens=4, rows=2) for _ in range(MAX_POSITIONS // 8 + 1)]
        assert batches(filled(*longer)) == [longer[:-1], longer[-1:]]

    def test_one_that_is_wide_is_alone(self) -> None:
        one, wide, narrow, also_wide, last = works = [work(rows=rows) for rows in (1, CHUNK // 4, 15, 200, 1)]
        assert batches(filled(*works)) == [[one, narrow, last], [wide], [also_wide]]
        assert batches(filled(wide, one, also_wide)) == [[wide], [one], [also_wide]]

    @given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 100, 300])), max_size=30))
    def test_everything_is_computed_once_and_in_order(self, sizes: list[tuple[int, int]]) -> None:
        works = [work(num_tokens=num_tokens, rows=rows) for num_tokens, rows in sizes]
        order = {id(one): number for number, one in enumerate(works)}
        computed = batches(filled(*works))
        assert sorted(order[id(one)] for batch in computed for one in batch) == list(range(len(works)))
        firsts = [order[id(batch[0])] for batch in computed]
        assert firsts == sorted(firsts)  # nobody is overtaken by a whole batch of others
        for batch in computed:
            assert len({one.num_tokens for one in batch}) == 1
            assert len(batch) == 1 or sum(one.num_positions for one in batch) <= MAX_POSITIONS
            assert [order[id(one)] for one in batch] == sorted(order[id(one)] for one in batch)


@dataclass(eq=False)
class Prompt:
    """A prompt that comes chunk by chunk, each when the one before has been computed.

    Attributes:
        came, ended: in positions that had been computed by then.
        chunks: when each was computed, and how many positions it had.
    """

    length: int
    client: str = ""
    user: str = ""
    came: int = 0
    ended: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def next_chunk(self) -> WorkItem:
        num_left = self.length - sum(size for _, size in self.chunks)
        size = min(CHUNK, num_left)
        step = SessionStep(self.length - num_left, BlockInput(torch.zeros(1, size, 1)), num_following=num_left - size)
        names = {"client": self.client, "user": self.user}
        return WorkItem(WorkKind.PREFILL, deliver=print, session=self, step=step, cost=size, **names)

    @property
    def wait(self) -> int:
        return self.ended - self.came


class Server:
    """Computes prompts; time is the number of positions that it has computed."""

    def __init__(self) -> None:
        self.queue = WorkQueue(chunk_positions=CHUNK)
        self.time = 0
        self.kinds: list[WorkKind] = []

    def add(self, prompt: Prompt) -> None:
        prompt.came = self.time
        self.queue.add(prompt.next_chunk())

    def run(self, on_end: Callable[[Prompt], None] = lambda _prompt: None, until: int = 10**9) -> None:
        while self.time < until and (batch := self.queue.next_batch()):
            self.kinds.append(batch[0].kind)
            prompts = [(one.session, one.num_positions) for one in batch if one.kind is WorkKind.PREFILL]
            self.time += sum(size for _, size in prompts)
            for prompt, size in prompts:
                prompt.chunks.append((self.time, size))
                if sum(size for _, size in prompt.chunks) < prompt.length:
                    self.queue.add(prompt.next_chunk())
                else:
                    prompt.ended = self.time
                    on_end(prompt)


LENGTHS = (13, 26, 78, 260, 650)  # tokens of 10, 20, 60, 200 and 500 words


def percentile(waits: Sequence[int], part: float) -> int:
    return sorted(waits)[int(part * (len(waits) - 1))]


class TestPrompts:
    def test_a_prompt_that_has_begun_does_not_go_to_the_end_at_each_chunk(self) -> None:
        server, prompts = Server(), [Prompt(650) for _ in range(10)]
        for prompt in prompts:
            server.add(prompt)
        server.run()
        assert [prompt.ended for prompt in prompts] == [650 * number for number in range(1, 11)]

    @pytest.mark.parametrize("seed", range(2))
    def test_many_streams_of_mixed_prompts(self, seed: int) -> None:
        chance, server, done = random.Random(seed), Server(), []

        def send(prompt: Prompt | None = None) -> None:
            if prompt is not None:
                done.append(prompt)
            server.add(Prompt(chance.choice(LENGTHS), user=""))

        for _ in range(64):
            send()
        server.run(send, until=150_000)
        waits = [prompt.wait for prompt in done]
        assert percentile(waits, 0.99) <= 3 * percentile(waits, 0.5)
        medians = [percentile([one.wait for one in done if one.length == length], 0.5) for length in LENGTHS]
        assert medians == sorted(medians) and medians[-1] > 3 * medians[0]

    @pytest.mark.parametrize("seed", range(2))
    def test_who_sends_one_prompt_after_another_overtakes_with_less_than_a_prompt_has_itself(self, seed: int) -> None:
        chance, server = random.Random(seed), Server()
        streams: dict[Prompt, int] = {}

        def send(number: int) -> None:
            prompt = Prompt(chance.choice(LENGTHS))
            streams[prompt] = number
            server.add(prompt)

        for number in range(20):
            send(number)
        server.run(lambda prompt: send(streams[prompt]), until=40_000)
        for prompt in list(streams):
            if not prompt.ended:
                continue
            for number in range(20):
                overtaking = sum(
                    size
                    for other, stream in streams.items()
                    if stream == number and other is not prompt and other.came > prompt.came
                    for time, size in other.chunks
                    if time <= prompt.ended
                )
                assert overtaking <= prompt.length + CHUNK

    def test_clients_and_their_users_have_equal_parts_whatever_they_say_of_their_prompts(self) -> None:
        server, counts = Server(), Counter[str]()

        def send(prompt: Prompt) -> None:
            counts[prompt.client + prompt.user] += prompt.length
            server.add(Prompt(prompt.length, prompt.client, prompt.user))

        for user in "abcd":
            for length in (64, 64, 128) if user == "a" else (64,):
                server.add(Prompt(length, "many", user))
        server.add(Prompt(640, "one"))
        server.run(send, until=64_000)
        assert counts["one"] == pytest.approx(32_000, abs=1000)
        assert [counts[f"many{user}"] for user in "abcd"] == pytest.approx([8000] * 4, abs=400)

    def test_of_a_prompt_that_has_gone_nothing_is_kept(self) -> None:
        queue = WorkQueue(chunk_positions=CHUNK)
        gone, waiting = Prompt(650).next_chunk(), Prompt(650).next_chunk()
        queue.add(gone)
        queue.discard(gone)
        assert not queue.is_prompt(gone.session)
        queue.add(waiting)
        assert queue.next_batch() == [waiting] and queue.is_prompt(waiting.session)
        queue.forget(waiting.session)
        assert not queue.is_prompt(waiting.session)


class TestLeaving:
    @pytest.mark.parametrize("kind", WorkKind)
    def test_work_whose_caller_has_gone(self, kind: WorkKind) -> None:
        first, gone, last = works = [call(kind) for _ in range(3)]
        queue = filled(*works)
        queue.discard(gone)
        queue.discard(gone)  # harmless
        assert (len(queue), num_waiting(queue, kind)) == (2, 2)
        assert batches(queue) == [[first], [last]]

    def test_everything_at_once(self) -> None:
        works = [work(kind) for kind in WorkKind]
        queue = filled(*works)
        assert queue.clear() == works
        assert len(queue) == 0 and queue.next_batch() == []
