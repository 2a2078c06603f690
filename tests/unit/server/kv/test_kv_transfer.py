"""Keys and values as bytes: what does not fit is refused, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, Session
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_transfer import Stored
from tests.unit.server.engine.test_engine import Generation, advance
from tests.zoo import save_checkpoint

LENGTH = 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    """Of blocks with and without windows."""
    directory = tmp_path_factory.mktemp("gemma3")
    save_checkpoint("gemma3_text", directory)
    checkpoint = ModelCheckpoint.open(directory)
    return Engine(load_blocks(checkpoint, checkpoint.family.all_blocks))


@pytest.fixture
def budget(engine: Engine) -> CacheBudget:
    return CacheBudget(1000 * engine.layout.token_bytes, 1)


@pytest.fixture
def original(engine: Engine, budget: CacheBudget) -> Generation:
    generation = Generation.open(engine, budget, engine.layout.hosted, batch_size=2)
    for _ in range(2):  # more than windows keep
        advance(engine, [generation], LENGTH // 2)
    return generation


def copy_of(original: Generation, engine: Engine, budget: CacheBudget, batch_size: int = 2) -> Session:
    return engine.open(original.session.blocks, batch_size, budget.lease("copy"))


def test_positions_that_windows_have_dropped_do_not_travel(engine, original):
    stored = engine.stored(original.session, 0, original.session.length)
    assert stored.num_tokens == original.session.length
    assert min(stored.num_kept) < max(stored.num_kept) == original.session.length


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda stored: Stored(stored.num_tokens, stored.num_kept, stored.data[:-1]), r"take \d+ bytes: expected \d+"),
        (lambda stored: Stored(stored.num_tokens, stored.num_kept[:1], stored.data), "these blocks keep others"),
        (lambda stored: Stored(stored.num_tokens - 1, stored.num_kept, stored.data), "these blocks keep others"),
        (lambda stored: Stored(10**9, stored.num_kept, stored.data), "these blocks keep others"),
    ],
    ids=["bytes", "groups", "fewer", "more"],
)
def test_what_does_not_fit_is_refused(engine, budget, original, change, sentence):
    copy = copy_of(original, engine, budget)
    stored = engine.stored(original.session, 0, original.session.length)
    with pytest.raises(RequestRejected, match=sentence):
        engine.adopt(copy, 0, (), change(stored))
    assert copy.length == 0
    engine.adopt(copy, 0, (), stored)
    original.session = copy
    advance(engine, [original], 3)


def test_another_number_of_rows_is_refused(engine, budget, original):
    copy = copy_of(original, engine, budget, batch_size=3)
    with pytest.raises(RequestRejected, match="expected"):
        engine.adopt(copy, 0, (), engine.stored(original.session, 0, original.session.length))


def test_a_gap_is_refused(engine, budget, original):
    copy = copy_of(original, engine, budget)
    with pytest.raises(RequestRejected, match="begins at position 3, but the session has 0"):
        engine.adopt(copy, 3, (), engine.stored(original.session, 3, original.session.length))
    with pytest.raises(RequestRejected, match="begins at position 9"):
        engine.adopt(copy, 0, (Crop(9),), engine.stored(original.session, 0, 3))


def test_a_closed_session_takes_nothing(engine, budget, original):
    copy = copy_of(original, engine, budget)
    engine.close(copy)
    with pytest.raises(RequestRejected, match="closed"):
        engine.adopt(copy, 0, (), engine.stored(original.session, 0, 3))


def test_without_room_nothing_is_taken(engine, original):
    little = CacheBudget(engine.layout.token_bytes, 1)
    copy = copy_of(original, engine, little)
    with pytest.raises(PeerBusy, match="no room"):
        engine.adopt(copy, 0, (), engine.stored(original.session, 0, original.session.length))
    assert copy.length == 0
    engine.close(copy)
    assert little.tokens_left == little.capacity_bytes


def test_dtypes_keep_their_bits(tmp_path, budget):
    save_checkpoint("llama", tmp_path)
    engine = Engine(load_blocks(ModelCheckpoint.open(tmp_path), Span(0, 2), dtype=torch.bfloat16))
    session, copy = (engine.open(Span(0, 2), 1, budget.lease(name)) for name in "ab")
    generation = Generation(engine, session, torch.ones(1, 0), torch.empty(1, 0, engine.hidden_size), torch.Generator())
    engine.run([(session, generation.step(5))])
    engine.adopt(copy, 0, (), engine.stored(session, 0, 5))
    assert torch.equal(engine.stored(copy, 0, 5).data, engine.stored(session, 0, 5).data)
