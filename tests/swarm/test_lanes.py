"""Rows of a large batch in several lanes: texts, caches and failures are those of one session."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from swarm_client.core import background
from swarm_client.core.events import Waiting
from swarm_client.sessions.lane import Lane
from swarm_client.sessions.session import RemoteSession
from swarm_client.verification.session_checks import SessionChecks
from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.wire.block_input import BlockInput
from tests.swarm.dividing import always_divided
from tests.swarm.pair import Pair, connected, random_ids, started
from tests.zoo import PAD

SPANS = ("0:2", "2:5", "5:6")

ROWS, LANES = 6, 3
PROMPT = random_ids(ROWS, 9, seed=0)


@pytest.fixture(autouse=True)
def divides(monkeypatch) -> None:
    always_divided(monkeypatch, ROWS // LANES)


def lanes_of(session: RemoteSession) -> list[int]:
    """The rows in each."""
    assert len(session._lanes) == len(session._sizes)
    return session._sizes


class Caches:
    """What is done to a cache, done to that of the whole model and to the remote one."""

    def __init__(self, pair: Pair, ids: torch.Tensor | None = PROMPT) -> None:
        self.remote = pair.remote.new_cache()
        self._models = {pair.whole: DynamicCache(config=pair.whole.config), pair.remote: self.remote}
        if ids is not None:
            self.extend(ids)

    @property
    def session(self) -> RemoteSession:
        return self.remote.session

    @torch.no_grad()
    def extend(self, ids: torch.Tensor, **options) -> None:
        outputs = [
            model(ids, past_key_values=cache, use_cache=True, **options) for model, cache in self._models.items()
        ]
        torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(outputs[1].hidden_states or (), outputs[0].hidden_states or (), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def do(self, name: str, *arguments) -> None:
        for cache in self._models.values():
            getattr(cache, name)(*arguments)

    def fork(self) -> None:
        self._models = {model: copy.deepcopy(cache) for model, cache in self._models.items()}
        self.remote = list(self._models.values())[1]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        pytest.param({"num_beams": 3}, marks=pytest.mark.promise("a large batch is computed in several lanes")),
        {"num_return_sequences": 4, "num_beams": 4},
    ],
    ids=str,
)
def test_texts_of_a_padded_batch(pair, options) -> None:
    ids, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    ids[1, :4], mask[1, :4] = PAD, 0
    whole, remote = pair.both(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    assert torch.equal(remote.sequences, whole.sequences)
    num_beams = options.get("num_beams", 1)
    sizes = lanes_of(remote.past_key_values.session)
    assert len(sizes) >= LANES and all(size % num_beams == 0 for size in sizes)


def test_a_cache_that_is_cropped_and_goes_on(pair) -> None:
    caches = Caches(pair)
    assert lanes_of(caches.session) == [2, 2, 2]
    caches.do("crop", -4)
    caches.extend(random_ids(ROWS, 2, seed=1), output_hidden_states=True)
    assert caches.session.length == 7 and lanes_of(caches.session) == [2, 2, 2]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([1, 0, 3, 3, 5, 4], [2, 2, 2]),
        ([0, 1, 5], [2, 1]),
        ([0, 0, 0, 1, 2, 2, 5, 5, 5], [4, 2, 3]),
        ([5, 4, 3, 2, 1, 0], [6]),
        ([4, 0], [2]),
    ],
    ids=str,
)
def test_rows_change_places(pair, rows, sizes) -> None:
    """Within lanes that goes on; across them they become one, and stay so."""
    caches = Caches(pair)
    caches.extend(random_ids(ROWS, 1, seed=2))
    caches.do("batch_select_indices", torch.tensor(rows))
    assert lanes_of(caches.session) == sizes
    caches.extend(random_ids(len(rows), 1, seed=3))
    caches.do("batch_repeat_interleave", 2)
    caches.extend(random_ids(2 * len(rows), 2, seed=4))
    assert lanes_of(caches.session) == [2 * size for size in sizes]


def test_padded_rows_change_places_across_lanes(pair) -> None:
    """Some lanes have a mask, and others have none."""
    ids, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    ids[1, :4], mask[1, :4] = PAD, 0
    rows = torch.tensor([5, 1, 0, 3, 2, 4])
    texts = []
    for model in (pair.whole, pair.remote):
        cache = pair.remote.new_cache() if model is pair.remote else DynamicCache(config=pair.whole.config)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache.reorder_cache(rows)
            longer = torch.cat([mask[rows], torch.ones(ROWS, 1, dtype=mask.dtype)], 1)
            positions = longer.sum(1, keepdim=True) - 1
            new = random_ids(ROWS, 1, seed=5)
            texts.append(
                model(new, attention_mask=longer, position_ids=positions, past_key_values=cache, use_cache=True).logits
            )
    torch.testing.assert_close(texts[1], texts[0], rtol=1e-4, atol=1e-4)


def test_a_fork_goes_on_in_lanes(pair) -> None:
    caches = Caches(pair)
    before = caches.session
    caches.fork()
    caches.extend(random_ids(ROWS, 1, seed=6))
    assert lanes_of(caches.session) == [2, 2, 2] and (before.length, caches.session.length) == (9, 10)


def test_a_pass_that_comes_before_the_first_step(pair) -> None:
    """Positions that were computed without a session are divided when servers are asked for them."""
    cache = DynamicCache(config=pair.whole.config)
    new = random_ids(ROWS, 1, seed=7)
    output = pair.remote(PROMPT)
    assert output.past_key_values.session.hops == ()
    with torch.no_grad():
        pair.whole(PROMPT, past_key_values=cache)
        expected = pair.whole(new, past_key_values=cache).logits
        found = pair.remote(new, past_key_values=output.past_key_values).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert lanes_of(output.past_key_values.session) == [2, 2, 2]


@pytest.fixture
def failing(monkeypatch) -> Callable[[RemoteSession], None]:
    """Has the next step of a session's last lane fail."""
    step, fails = Lane.step, list[RemoteSession]()

    def have_come_through(lanes: list[Lane]) -> bool:
        return all(lane.chain.hops and not lane.chain.busy.locked() for lane in lanes)

    async def stepped(lane: Lane, inputs: BlockInput, *arguments):
        if fails and lane is fails[0]._lanes[-1]:
            others = fails.pop()._lanes[:-1]
            await asyncio.sleep(0)  # they begin
            while not have_come_through(others):
                await asyncio.sleep(0.01)
            raise RequestRejected("for a test")
        return await step(lane, inputs, *arguments)

    monkeypatch.setattr(Lane, "step", stepped)
    return fails.append


def test_a_step_that_one_lane_fails_was_none(pair, failing) -> None:
    """The others have taken it, and take it again; rows change places once."""
    caches, new = Caches(pair), random_ids(ROWS, 1, seed=8)
    caches.do("batch_select_indices", torch.tensor([1, 0, 3, 3, 5, 4]))
    failing(caches.session)
    with pytest.raises(RequestRejected, match="for a test"), torch.no_grad():
        pair.remote(new, past_key_values=caches.remote, use_cache=True)
    assert caches.session.length == 9
    caches.extend(new)
    caches.extend(new)
    assert lanes_of(caches.session) == [2, 2, 2]


def test_a_first_step_that_fails_leaves_a_session_for_other_rows(pair, failing) -> None:
    caches = Caches(pair, None)
    failing(caches.session)
    with pytest.raises(RequestRejected, match="for a test"), torch.no_grad():
        pair.remote(PROMPT, past_key_values=caches.remote, use_cache=True)
    caches.extend(random_ids(ROWS - 2, 3, seed=9))
    assert lanes_of(caches.session) == [2, 2]


def test_a_step_after_an_interruption_waits_for_what_that_leaves_to_be_done(pair, monkeypatch) -> None:
    """The first lane has come through; the last one is slow to end. Rows change places once."""
    step, cache, undisturbed = Lane.step, pair.remote.new_cache(), pair.remote.new_cache()
    session, stuck = cache.session, []
    rows, new = torch.tensor([1, 0, 3, 3, 5, 4]), random_ids(ROWS, 1, seed=11)
    with torch.no_grad():
        for each in (cache, undisturbed):
            pair.remote(PROMPT, past_key_values=each)
            each.reorder_cache(rows)
        inputs = BlockInput(pair.remote.get_input_embeddings()(new), None, torch.tensor([[PROMPT.shape[1]]]))

    async def stepped(lane: Lane, *arguments):
        if lane is session._lanes[-1] and not stuck:
            stuck.append(lane)
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.2)
        return await step(lane, *arguments)

    async def interrupted() -> torch.Tensor:
        task = asyncio.ensure_future(session.step_on_loop(inputs))
        number = session._lanes[0].chain.number
        while session._lanes[0].chain.number == number or not stuck:
            await asyncio.sleep(0.01)
        task.cancel()
        following = asyncio.ensure_future(session.step_on_loop(inputs))
        with pytest.raises(asyncio.CancelledError):
            await task
        return await following

    monkeypatch.setattr(Lane, "step", stepped)
    found = background.run(interrupted())
    expected = undisturbed.session.step(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert session.length == PROMPT.shape[1] + 1


def test_lanes_that_are_asked_for_more_to_check_it_give_what_is_wanted(pair, monkeypatch) -> None:
    caches = Caches(pair)
    asked = iter([3, 1, 2])
    monkeypatch.setattr(SessionChecks, "num_asked", lambda _checks, _wanted, _tokens: next(asked))
    caches.extend(random_ids(ROWS, 5, seed=12), logits_to_keep=1)


def test_all_lanes_are_closed_and_go_on(pair) -> None:
    caches = Caches(pair)
    assert [str(hop.span) for hop in caches.session.hops] == ["0:2", "2:5", "5:6"]
    caches.session.close()
    assert caches.session.hops == ()
    pair.servers.wait_until_all_room_is_free()
    caches.extend(random_ids(ROWS, 1, seed=10))
    assert lanes_of(caches.session) == [2, 2, 2]
    caches.session.reset()
    assert caches.session.length == 0 and caches.session.batch_size is None
    pair.servers.wait_until_all_room_is_free()


# ------------------------------------------------------------ without room for all lanes


def test_what_never_fits_is_refused_at_once(tmp_path) -> None:
    """Some lanes would fit, and wait for the others for an hour."""
    with (
        started(tmp_path, "0:6", cache_tokens=128) as pair,
        connected(pair.servers, wait_timeout_s=3600.0) as remote,
        torch.no_grad(),
    ):
        with pytest.raises(PeerBusy):
            remote(PROMPT, past_key_values=remote.new_cache(30))
        caches = Caches(pair, random_ids(2, 9, seed=14))
        assert lanes_of(caches.session) == [2]


def test_a_batch_waits_for_room_for_all_of_it(tmp_path) -> None:
    """It holds none meanwhile, and goes on in one lane."""
    with started(tmp_path, "0:6", cache_tokens=192) as pair, torch.no_grad():
        other = pair.remote.new_cache(30)
        pair.remote(PROMPT[:2], past_key_values=other)
        leaves = threading.Thread(target=other.session.close)

        def heard(event: object) -> None:
            if isinstance(event, Waiting) and leaves.ident is None:
                leaves.start()

        cache = pair.remote.new_cache(30, on_event=heard)
        found = pair.remote(PROMPT, past_key_values=cache).logits
        leaves.join()
        torch.testing.assert_close(found, pair.whole(PROMPT).logits, rtol=1e-4, atol=1e-4)
        assert lanes_of(cache.session) == [ROWS]
