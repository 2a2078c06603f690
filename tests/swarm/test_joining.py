"""``generate`` in several threads: those that meet are computed together, and write what they write alone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from swarm_client import RequestRejected, SwarmError
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import Request, TokenListener
from swarm_client.batching.row import BatchRow
from tests.swarm.meeting import GREEDY, Gate, another_under_way, sequences
from tests.swarm.pair import random_ids, started
from tests.swarm.waiting import DEADLINE_S, wait_for

SPANS = ("0:2", "2:6")


@pytest.fixture
def submitted(monkeypatch) -> list[Request]:
    """What goes through loops."""
    requests: list[Request] = []
    submit = GenerationLoop.submit

    def spy(self: GenerationLoop, request: Request, listener: TokenListener) -> BatchRow:
        generation = submit(self, request, listener)
        requests.append(request)
        return generation

    monkeypatch.setattr(GenerationLoop, "submit", spy)
    return requests


def test_one_alone_is_the_stock_method(pair, submitted):
    ids = random_ids(1, 5, seed=0)
    assert torch.equal(pair.remote.generate(ids, **GREEDY), pair.whole.generate(ids, **GREEDY))
    assert submitted == []


@pytest.mark.promise("generations share steps, and each writes what it writes alone")
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
        ({"encoder_repetition_penalty": 3.0}, True),
        ({"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[45], 99.0]]}, True),  # a token of the prompt
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


def test_who_computes_in_a_format_of_its_thread_does_not_join(pair, submitted):
    """``torch.autocast`` is of one thread, and not of the loop's."""
    with another_under_way(pair), torch.autocast("cpu", torch.bfloat16):
        pair.remote.generate(random_ids(1, 5, seed=3), **GREEDY)
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
            running.append(pool.submit(pair.remote.generate, ids, streamer=gate, max_new_tokens=200))
            assert gate.arrived.wait(DEADLINE_S)
        gates[1].opened.set()
        wait_for(lambda: pair.remote._shared_loop._loop is not None, "the second goes through the loop")
        closing = pool.submit(pair.remote.close)
        closing.result(DEADLINE_S)
        gates[0].opened.set()
        for generating in running:
            with pytest.raises((SwarmError, RequestRejected)):
                generating.result(DEADLINE_S)
