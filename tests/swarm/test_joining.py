"""``generate`` in several threads: those that meet are computed together, and write what they write alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from swarm_client import RequestRejected, SwarmError
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import Generation, Listener, Request
from tests.drafts import Always, KnowingDraft
from tests.swarm.pair import Pair, random_ids, started
from tests.swarm.waiting import DEADLINE_S, wait_for

GREEDY = {"max_new_tokens": 8, "do_sample": False}


class Gate(BaseStreamer):
    """Holds up a generation until it is opened, at its prompt or after so many tokens. Keeps what it gets."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self.got: list[list[int]] = []
        self.num_ends = 0
        self._num_tokens = num_tokens

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())
        if len(self.got) > self._num_tokens:
            self.arrived.set()
            assert self.opened.wait(DEADLINE_S)

    def end(self) -> None:
        self.num_ends += 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    with started(tmp_path_factory.mktemp("llama"), "0:2", "2:6") as pair:
        yield pair


@pytest.fixture
def submitted(monkeypatch) -> list[Request]:
    """What goes through loops."""
    requests: list[Request] = []
    submit = GenerationLoop.submit

    def spy(self: GenerationLoop, request: Request, listener: Listener) -> Generation:
        generation = submit(self, request, listener)
        requests.append(request)
        return generation

    monkeypatch.setattr(GenerationLoop, "submit", spy)
    return requests


@pytest.fixture
def taken_over(monkeypatch) -> list[Any]:
    """The texts that loops go on with."""
    texts: list[Any] = []
    take_over = GenerationLoop.take_over

    def spy(self: GenerationLoop, text: Any, *others: Any) -> Generation:
        texts.append(text)
        return take_over(self, text, *others)

    monkeypatch.setattr(GenerationLoop, "take_over", spy)
    return texts


@contextmanager
def another_under_way(pair: Pair) -> Iterator[None]:
    gate = Gate()
    ids = random_ids(1, 5, seed=99)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(pair.remote.generate, ids, streamer=gate, **GREEDY)
        assert gate.arrived.wait(DEADLINE_S)
        try:
            yield
        finally:
            gate.opened.set()
        assert torch.equal(generating.result(), pair.whole.generate(ids, **GREEDY))


def test_one_alone_is_the_stock_method(pair, submitted):
    ids = random_ids(1, 5, seed=0)
    assert torch.equal(pair.remote.generate(ids, **GREEDY), pair.whole.generate(ids, **GREEDY))
    assert submitted == []


def test_threads_that_meet_write_what_each_writes_alone(pair, submitted):
    prompts = [random_ids(1, 3 + number, seed=number) for number in range(6)]
    with another_under_way(pair), ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda ids: pair.remote.generate(ids, **GREEDY), prompts))
    for ids, output in zip(prompts, outputs, strict=True):
        assert torch.equal(output, pair.whole.generate(ids, **GREEDY))
    assert len(submitted) == len(prompts)
    assert pair.remote._shared_loop._loop is None  # no thread is left
    pair.servers.wait_until_all_room_is_free()


def test_sampling_draws_from_the_same_random_numbers(pair, submitted):
    ids, options = random_ids(1, 6, seed=0), {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 30}
    torch.manual_seed(7)
    expected = pair.whole.generate(ids, **options)
    after = torch.rand(1)
    with another_under_way(pair):
        torch.manual_seed(7)
        assert torch.equal(pair.remote.generate(input_ids=ids, **options), expected)
    assert torch.equal(torch.rand(1), after) and len(submitted) == 1


def test_a_streamer_gets_prompt_tokens_and_end(pair, submitted):
    ids, stream = random_ids(1, 4, seed=0), Gate()
    stream.opened.set()
    with another_under_way(pair):
        output = pair.remote.generate(ids, streamer=stream, **GREEDY)
    assert stream.got == [ids[0].tolist(), *([token] for token in output[0, 4:].tolist())]
    assert stream.num_ends == 1 and len(submitted) == 1


class Favourite(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, torch.tensor([11]), 1e4)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "joins"),
    [
        ({"repetition_penalty": 1.4}, True),
        ({"logits_processor": [Favourite()]}, True),
        ({"attention_mask": torch.ones(1, 5, dtype=torch.int64)}, True),
        ({"num_beams": 3}, False),
        ({"num_return_sequences": 2, "do_sample": True}, False),
        ({"return_dict_in_generate": True}, False),
        ({"stopping_criteria": [lambda ids, _scores: torch.tensor([ids.shape[1] >= 8])]}, False),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, False),
        ({"use_cache": False}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_whatever_is_asked_for_is_what_is_given(pair, submitted, options: dict[str, Any], joins: bool):
    ids = random_ids(1, 5, seed=3)
    torch.manual_seed(1)
    expected = pair.whole.generate(ids, **{**GREEDY, **options})
    with another_under_way(pair):
        torch.manual_seed(1)
        output = pair.remote.generate(ids, **{**GREEDY, **options})
    assert torch.equal(sequences(output), sequences(expected))
    assert type(output) is type(expected) or isinstance(output, torch.Tensor)
    assert len(submitted) == joins


def test_a_cache_of_ones_own_and_inference_mode(pair, submitted):
    ids = random_ids(1, 5, seed=4)
    expected = pair.whole.generate(ids, **GREEDY)
    with another_under_way(pair):
        cache = pair.remote.new_cache()
        assert torch.equal(pair.remote.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1 and submitted == []
        with torch.inference_mode():
            assert torch.equal(pair.remote.generate(ids, **GREEDY), expected)
    assert len(submitted) == 1


@pytest.mark.parametrize(
    ("options", "joins"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 1.3, "top_k": 30}, True),
        ({"repetition_penalty": 1.4}, True),
        ({"eos_token_id": None}, True),
        ({"return_dict_in_generate": True}, True),
        ({"stopping_criteria": [lambda ids, _scores: torch.tensor([ids.shape[1] >= 11])]}, False),
        ({"max_time": 600.0}, False),
        ({"guidance_scale": 1.5}, False),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 5]])}, False),
        ({"output_scores": True, "return_dict_in_generate": True}, False),
    ],
    ids=lambda value: next(iter(value), "greedy") if isinstance(value, dict) else "",
)
def test_one_that_has_begun_alone_goes_on_with_those_that_come(pair, taken_over, options: dict[str, Any], joins: bool):
    ids = random_ids(1, 5, seed=3)
    options = {**GREEDY, "max_new_tokens": 10, **options}
    if "eos_token_id" in options:
        options["eos_token_id"] = int(pair.whole.generate(ids, **GREEDY)[0, 5 + 4])
    torch.manual_seed(1)
    expected = pair.whole.generate(ids, **options)
    torch.manual_seed(1)
    first, cache = Gate(num_tokens=2), pair.remote.new_cache()
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(pair.remote.generate, ids, streamer=first, past_key_values=cache, **options)
        assert first.arrived.wait(DEADLINE_S)
        with another_under_way(pair):
            first.opened.set()
            output = beginning.result()
    assert torch.equal(sequences(output), sequences(expected)) and type(output) is type(expected)
    assert first.got == [ids[0].tolist(), *([token] for token in sequences(output)[0, 5:].tolist())]
    assert first.num_ends == 1 and len(taken_over) == joins
    assert cache.get_seq_length() == sequences(expected).shape[1] - 1
    if "position_ids" in options:
        return
    longer = torch.cat([sequences(output), random_ids(1, 2, seed=5)], 1)
    again = pair.remote.generate(longer, past_key_values=cache, **GREEDY)
    assert torch.equal(again, pair.whole.generate(longer, **GREEDY))
    assert cache.session.stats.replayed_tokens == 0  # its session was still open


def test_one_that_was_taken_over_gives_its_room_back_at_once(pair, monkeypatch):
    """Nothing is left of its session, not even in cycles of references, which would be collected some time."""
    ids, first = random_ids(1, 5, seed=3), Gate(num_tokens=2)
    sessions: list[weakref.ref] = []
    take_over = GenerationLoop.take_over

    def spy(self: GenerationLoop, text: Any, ends: Any, session: Any, *others: Any) -> Generation:
        sessions.append(weakref.ref(session))
        return take_over(self, text, ends, session, *others)

    monkeypatch.setattr(GenerationLoop, "take_over", spy)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # which servers call
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            beginning = pool.submit(pair.remote.generate, ids, streamer=first, **GREEDY)
            assert first.arrived.wait(DEADLINE_S)
            with another_under_way(pair):
                first.opened.set()
                beginning.result()
        wait_for(lambda: [session() for session in sessions] == [None], "the session is gone")
    finally:
        gc.enable()


def test_a_text_that_ends_among_guesses_leaves_none_of_them_in_its_session(pair, taken_over, monkeypatch):
    """It is taken over, then alone in the loop, where it guesses again: rightly, and beyond its end."""
    ids = random_ids(1, 5, seed=3)
    greedy = pair.whole.generate(ids, max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": int(greedy[0, 5 + 4])}
    expected = pair.whole.generate(ids, **options)
    assert expected.shape[1] < greedy.shape[1]
    monkeypatch.setattr(pair.remote, "speculation", Always(KnowingDraft([greedy[0].tolist()], 1.0), 1, 12))
    first, second, cache = Gate(num_tokens=1), Gate(num_tokens=1), pair.remote.new_cache()
    with ThreadPoolExecutor(2) as pool:
        beginning = pool.submit(pair.remote.generate, ids, streamer=first, past_key_values=cache, **options)
        assert first.arrived.wait(DEADLINE_S)
        coming = pool.submit(pair.remote.generate, random_ids(1, 5, seed=99), streamer=second, **GREEDY)
        assert second.arrived.wait(DEADLINE_S)
        wait_for(lambda: not pair.remote._shared_loop._loop._rows, "all of the second is computed, though not read")
        first.opened.set()
        wait_for(lambda: taken_over, "the first goes on in the loop")
        second.opened.set()
        output = beginning.result()
        coming.result()
    assert torch.equal(output, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_whoever_computes_in_a_format_of_its_thread_stays_by_itself(pair, submitted, taken_over):
    """``torch.autocast`` is of one thread, and not of the loop's."""
    ids, first = random_ids(1, 5, seed=3), Gate(num_tokens=2)

    def generate(**options: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return pair.remote.generate(ids, **options, **GREEDY)

    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(generate, streamer=first)
        assert first.arrived.wait(DEADLINE_S)
        with another_under_way(pair):
            first.opened.set()
            assert torch.equal(generate(), beginning.result())
    assert len(submitted) == 1 and taken_over == []  # the other one


class Interrupted(Gate):
    """Raises at its sixth token, when the cache has as many positions."""

    def __init__(self, cache: Cache, at_length: int) -> None:
        super().__init__(num_tokens=1)
        self._cache, self._at_length = cache, at_length

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.got) > 6:
            wait_for(lambda: self._cache.get_seq_length() >= self._at_length, "the loop is ahead of its listener")
            raise KeyboardInterrupt


@pytest.mark.parametrize("size", [(1, 0), (1, 12), (3, 8)], ids=["without-guesses", "guesses", "rows-of-guesses"])
@pytest.mark.parametrize("has_company", [False, True], ids=["alone", "among-others"])
def test_after_an_interruption_a_cache_is_where_the_text_is(pair, taken_over, monkeypatch, size, has_company):
    ids = random_ids(1, 5, seed=3)
    whole = pair.whole.generate(ids, max_new_tokens=40, do_sample=False)
    monkeypatch.setattr(pair.remote, "speculation", Always(KnowingDraft([whole[0].tolist()], 1.0), *size))
    cache = pair.remote.new_cache()
    first = Interrupted(cache, 5 + 9 if has_company else 0)
    options = {"max_new_tokens": 40, "do_sample": False, "past_key_values": cache}
    with ThreadPoolExecutor(1) as pool, another_under_way(pair) if has_company else nullcontext():
        beginning = pool.submit(pair.remote.generate, ids, streamer=first, **options)
        assert has_company or first.arrived.wait(DEADLINE_S)
        first.opened.set()
        with pytest.raises(KeyboardInterrupt):
            beginning.result()
    written = torch.tensor([[*first.got[0], *(token for got in first.got[1:] for token in got)]])
    assert torch.equal(written, whole[:, : 5 + 6]) and len(taken_over) == has_company
    assert cache.get_seq_length() == written.shape[1] - 1
    monkeypatch.undo()
    longer = torch.cat([written, random_ids(1, 2, seed=5)], 1)
    again = pair.remote.generate(longer, past_key_values=cache, **GREEDY)
    assert torch.equal(again, pair.whole.generate(longer, **GREEDY))


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def test_several_rows_are_a_batch_of_their_own(pair, submitted):
    ids = random_ids(3, 5, seed=0)
    with another_under_way(pair):
        assert torch.equal(pair.remote.generate(ids, **GREEDY), pair.whole.generate(ids, **GREEDY))
    assert submitted == []


def test_a_mistake_is_named_as_the_stock_method_names_it(pair):
    with another_under_way(pair), pytest.raises(RequestRejected, match="positions"):
        pair.remote.generate(random_ids(1, 5, seed=0), max_new_tokens=10**6)


def test_who_is_interrupted_frees_its_room(pair):
    class Interrupted(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    with another_under_way(pair), pytest.raises(KeyboardInterrupt):
        pair.remote.generate(random_ids(1, 5, seed=0), max_new_tokens=60, streamer=Interrupted())
    pair.servers.wait_until_all_room_is_free()


def test_one_that_ends_does_not_close_the_loop_of_those_that_come(pair):
    shared = pair.remote._shared_loop
    with shared.running() as are_others:
        assert not are_others
        with shared.running() as are_others:
            assert are_others
            shared._of(pair.remote)
        assert shared._loop is not None  # the first is under way
    assert shared._loop is None


def test_closing_the_model_ends_all(tmp_path):
    with started(tmp_path, "0:6") as pair, ThreadPoolExecutor(3) as pool:
        gates = [Gate() for _ in range(2)]
        running: list[Future[Any]] = []
        for number, gate in enumerate(gates):
            ids = random_ids(1, 5, seed=number)
            running.append(pool.submit(pair.remote.generate, ids, streamer=gate, max_new_tokens=60))
            assert gate.arrived.wait(DEADLINE_S)
        gates[1].opened.set()
        wait_for(lambda: pair.remote._shared_loop._loop is not None, "the second goes through the loop")
        closing = pool.submit(pair.remote.close)
        closing.result(DEADLINE_S)
        gates[0].opened.set()
        for generating in running:
            with pytest.raises((SwarmError, RequestRejected)):
                generating.result(DEADLINE_S)
