"""States of fixed size: their room, what they refuse, and copies that lack them."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks.blocks import load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, Session, SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.row_states import COPIES
from tests.zoo import BLOCKS, HIDDEN, save_checkpoint

pytestmark = pytest.mark.usefixtures("quick_collections")
ALL = Span(0, BLOCKS)
PLENTY = 1 << 30
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    directory = tmp_path_factory.mktemp("jamba")
    save_checkpoint("jamba", directory)
    return Engine(load_blocks(ModelCheckpoint.open(directory), ALL))


@pytest.fixture
def budget() -> CacheBudget:
    return CacheBudget(PLENTY, 1)


def opened(engine: Engine, budget: CacheBudget, batch_size: int = 1) -> Session:
    return engine.open(ALL, batch_size, budget.lease("client"))


def run(engine: Engine, session: Session, start: int, hidden: torch.Tensor, **fields) -> torch.Tensor | Exception:
    changes = fields.pop("changes", ())
    (output,) = engine.run([(session, SessionStep(start, BlockInput(hidden, **fields), changes))])
    return output


def test_their_room_is_counted_and_comes_back(engine, budget):
    session = opened(engine, budget, batch_size=2)
    assert session.layout.state_bytes > 0
    run(engine, session, 0, torch.randn(2, 1, HIDDEN))
    for position in range(1, 4):
        run(engine, session, position, torch.randn(2, 1, HIDDEN))
        gc.collect()
        positions = sum(part.page.token_bytes * part.page.capacity for part in parts_of(session))
        assert PLENTY - budget.bytes_left == positions + COPIES * 2 * session.layout.state_bytes
    engine.close(session)
    gc.collect()
    assert budget.bytes_left == PLENTY


def parts_of(session: Session) -> list:
    pages = {id(part.page): part for row in session.state.rows for group in row.parts for part in group}
    return [part for part in pages.values() for _ in part.page.filled]


def test_without_room_for_them_a_step_is_refused(engine):
    session = opened(engine, CacheBudget(1000, 1))
    assert isinstance(run(engine, session, 0, torch.randn(1, 1, HIDDEN)), PeerBusy)
    assert session.length == 0


def test_padding_in_the_midst_of_a_session_is_refused_where_tokens_go_one_by_one(engine, budget):
    session, hidden = opened(engine, budget), torch.randn(1, 6, HIDDEN)
    whole = engine.stateless.forward(ALL, BlockInput(hidden))
    run(engine, session, 0, hidden[:, :3])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    refused = run(engine, session, 3, hidden[:, 3:], attention_mask=mask)
    assert isinstance(refused, RequestRejected) and "at the beginning of a session only" in str(refused)
    assert session.length == 3
    assert_close(run(engine, session, 3, hidden[:, 3:]), whole[:, 3:])


def test_a_copy_without_states_computes_nothing(engine, budget):
    session, copy = opened(engine, budget), opened(engine, budget)
    hidden = torch.randn(1, 6, HIDDEN)
    run(engine, session, 0, hidden[:, :5])
    engine.adopt(copy, 0, (), engine.stored(session, 0, 3))  # the states after three positions are not known any more
    refused = run(engine, copy, 3, hidden[:, 3:])
    assert isinstance(refused, RequestRejected) and "states after 3 positions have not come here" in str(refused)
    engine.adopt(copy, 3, (), engine.stored(session, 3, 5))
    assert_close(run(engine, copy, 5, hidden[:, 5:]), run(engine, session, 5, hidden[:, 5:]))


def test_the_last_step_can_be_taken_back_and_everything_can(engine, budget):
    session, hidden = opened(engine, budget), torch.randn(1, 6, HIDDEN)
    outputs = [run(engine, session, *step) for step in ((0, hidden[:, :4]), (4, hidden[:, 4:5]), (5, hidden[:, 5:]))]
    assert_close(run(engine, session, 5, hidden[:, 5:]), outputs[2])
    refused = run(engine, session, 4, hidden[:, 4:5])
    assert isinstance(refused, RequestRejected) and "6 positions cannot be cropped to 4" in str(refused)
    assert_close(run(engine, session, 0, hidden[:, :4], changes=(Crop(0),)), outputs[0])
