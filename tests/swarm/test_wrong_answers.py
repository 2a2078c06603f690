"""Servers that fail to compute, or compute nonsense: the client finds out which, and others take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from swarm_client.core.events import Recovery
from swarm_protocol.span import Span
from swarm_server.engine.engine import Engine
from tests.swarm.pair import Pair, random_ids, started
from tests.swarm.survival import SPANS

PROMPTS = {"in-a-prompt": random_ids(1, 150, seed=50), "later": random_ids(1, 8, seed=51)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    """Two servers for each span, one of which is fast."""
    with started(tmp_path_factory.mktemp("llama"), *SPANS) as pair:
        pair.servers.start(*SPANS, throughput=50.0)
        yield pair


@pytest.fixture
def events(pair) -> Iterator[list]:
    """What the client reports. After the test, the backoff of servers that failed is reset, and their room is free."""
    events: list = []
    config = pair.remote.blocks.swarm.config
    object.__setattr__(config, "on_event", events.append)
    yield events
    for record in pair.servers.records():
        pair.remote.blocks.swarm.served(record.peer_id)
    pair.servers.wait_until_all_room_is_free()


def fails(_outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("out of order")


MISTAKES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "fails": fails,
    "nan": lambda outputs: [torch.full_like(output, torch.nan) for output in outputs],
    "one-infinity": lambda outputs: [output.clone().index_fill_(2, torch.tensor([7]), torch.inf) for output in outputs],
    "narrower": lambda outputs: [output[:, :, :-1] for output in outputs],
    "more-rows": lambda outputs: [torch.cat([output, output]) for output in outputs],
}


def spoil(monkeypatch: pytest.MonkeyPatch, blocks: Span, good_runs: int, mistake: Callable) -> None:
    """Whichever server computes these blocks first makes the mistake for ever after so many runs."""
    run, runs = Engine.run, 0
    spoilt: list[Engine] = []

    def wrong(engine: Engine, batch) -> list:
        nonlocal runs
        outputs = run(engine, batch)
        if batch[0][0].blocks != blocks:
            return outputs
        if not spoilt:
            spoilt.append(engine)
        if engine is not spoilt[0]:
            return outputs
        runs += 1
        return mistake(outputs) if runs > good_runs else outputs

    monkeypatch.setattr(Engine, "run", wrong)


PROMISE = pytest.mark.promise("a server that answers nonsense is replaced, and no token is lost")


@pytest.mark.parametrize(
    ("mistake", "when", "hop"),
    [
        pytest.param("fails", "later", 0, marks=PROMISE),
        pytest.param("nan", "later", 1, marks=PROMISE),
        ("fails", "in-a-prompt", 1),
        ("nan", "in-a-prompt", 2),
        ("one-infinity", "later", 0),
        ("narrower", "later", 2),
        ("more-rows", "later", 1),
    ],
)
def test_another_takes_its_place(pair, events, monkeypatch, mistake, when, hop):
    """Only that one is replaced."""
    spoil(monkeypatch, Span.parse(SPANS[hop]), 3, MISTAKES[mistake])
    whole, remote = pair.both(PROMPTS[when], do_sample=False)
    assert torch.equal(remote, whole)
    assert [str(event.span) for event in events if isinstance(event, Recovery)] == [SPANS[hop]]
