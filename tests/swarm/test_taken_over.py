"""A ``generate`` that has begun alone goes on with those that come, and its session is its caller's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.row import BatchRow
from tests.drafts import Always, KnowingDraft
from tests.swarm.meeting import GREEDY, Gate, another_under_way, sequences
from tests.swarm.pair import random_ids
from tests.swarm.waiting import DEADLINE_S, wait_for

SPANS = ("0:2", "2:6")


@pytest.fixture
def taken_over(monkeypatch) -> Iterator[list[Any]]:
    """The texts that loops go on with."""
    texts: list[Any] = []
    take_over = GenerationLoop.take_over

    def spy(self: GenerationLoop, text: Any, *others: Any) -> BatchRow:
        texts.append(text)
        return take_over(self, text, *others)

    monkeypatch.setattr(GenerationLoop, "take_over", spy)
    yield texts
    # pytest keeps this list until ``pair`` has waited for free room, and a text's streamer may refer to its session.
    texts.clear()


@pytest.mark.parametrize(
    ("options", "joins"),
    [
        pytest.param({}, True, marks=pytest.mark.promise("a generate that has begun alone joins those that come")),
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


def test_one_that_was_taken_over_gives_its_room_back_at_once(pair, monkeypatch):
    """Nothing is left of its session, not even in cycles of references, which would be collected some time."""
    ids, first = random_ids(1, 5, seed=3), Gate(num_tokens=2)
    sessions: list[weakref.ref] = []
    take_over = GenerationLoop.take_over

    def spy(self: GenerationLoop, text: Any, ends: Any, session: Any, *others: Any) -> BatchRow:
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
