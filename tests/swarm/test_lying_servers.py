"""Servers that answer what looks right and is not: the client finds out which, and nobody else is blamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from swarm_client.core import background
from swarm_client.core.events import DoubtfulTokens, WrongAnswers
from swarm_client.sessions.session import RemoteSession
from swarm_client.verification.accusations import AccusationClient
from swarm_client.verification.checker import checker_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.engine import Engine
from swarm_server.training.stateless import StatelessPasses
from tests.marks import SLOW
from tests.swarm.pair import NEW_TOKENS, Pair, connected, random_ids, started
from tests.swarm.waiting import wait_for
from tests.unit.support import TIMEOUT_S
from tests.zoo import HIDDEN

SPANS = "0:3", "3:6"
FIRST_ONLY = 1e-9  # of what comes after the first answers, next to nothing is checked
TELL = AccusationClient.tell
PROMPT = random_ids(1, 12, seed=60)

Lie = Callable[[torch.Tensor], torch.Tensor]
LIES: dict[str, Lie] = {
    "scaled": lambda output: 1.01 * output,
    "zeros": torch.zeros_like,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    """Three servers for each span."""
    with started(tmp_path_factory.mktemp("llama"), *SPANS) as pair:
        pair.servers.start(*SPANS, *SPANS)
        yield pair


@pytest.fixture(autouse=True)
def apart(request, monkeypatch) -> None:
    """The swarm is not told in most tests: in the next one the same servers are honest."""
    if request.node.name != "test_a_liar_is_shown_to_the_whole_swarm":

        async def tell_nobody(*_: object) -> bool:
            return False

        monkeypatch.setattr(AccusationClient, "tell", tell_nobody)


@contextmanager
def client(pair: Pair, *, every_step: bool = False) -> Iterator[tuple[Pair, list]]:
    """Another client, which knows no server yet; and what it reports. It checks first answers, or every step."""
    events: list = []
    with connected(pair.servers, check_share=FIRST_ONLY, on_event=events.append) as remote:
        swarm = remote.blocks.swarm
        # On a busy machine checks take a while, and who does not answer for a moment is no witness.
        patient = replace(swarm.config.timeouts, connect_s=TIMEOUT_S, probe_s=TIMEOUT_S, check_s=TIMEOUT_S)
        swarm.config = replace(swarm.config, timeouts=patient)
        if every_step:
            checker_of(remote.blocks.swarm).share = 1e9
        yield Pair(pair.whole, remote, pair.servers), events


class Liar:
    """Whichever server computes these blocks first: it lies from so many steps on."""

    def __init__(self, patch: pytest.MonkeyPatch, blocks: str, lie: Lie, *, good_runs: int = 0, always: bool = True):
        """``always``: also when it is asked for a pass without a session."""
        self.engine: Engine | None = None
        self.runs = 0
        run, forward, span = Engine.run, StatelessPasses.forward, Span.parse(blocks)

        def lying_run(engine: Engine, batch) -> list:
            outputs = run(engine, batch)
            if self.engine is None and batch[0][0].blocks == span:
                self.engine = engine
            if engine is not self.engine:
                return outputs
            self.runs += 1
            return [lie(output) for output in outputs] if self.runs > good_runs else outputs

        def lying_forward(passes: StatelessPasses, *arguments, **options) -> torch.Tensor:
            output = forward(passes, *arguments, **options)
            is_liar = self.engine is not None and passes is self.engine.stateless
            return lie(output) if is_liar and always and self.runs > good_runs else output

        patch.setattr(Engine, "run", lying_run)
        patch.setattr(StatelessPasses, "forward", lying_forward)


def of(kind: type, events: list) -> list:
    return [event for event in events if isinstance(event, kind)]


def banned(pair: Pair) -> dict[str, str]:
    """The blocks of servers that the client does not use any more, by peer id."""
    swarm, records = pair.remote.blocks.swarm, pair.servers.records()

    async def find() -> dict[str, str]:
        return {record.peer_id: str(record.span) for record in records if swarm.is_banned(record.peer_id)}

    return background.run(find())


def finish_checks(session: RemoteSession) -> None:
    wait_for(lambda: not checker_of(session._setting.swarm).is_busy, "all checks are made")


@pytest.mark.promise("a server that lies is found, and its answers are taken back")
@pytest.mark.parametrize(("lie", "hop"), [("scaled", 0), pytest.param("zeros", 1, marks=SLOW)])
def test_the_first_answers_of_a_liar_are_taken_back(pair, monkeypatch, lie, hop):
    """Its first answers are checked before they are used, so that the tokens are those of the model."""
    liar = Liar(monkeypatch, SPANS[hop], LIES[lie])
    with client(pair) as (pair, events):
        whole, remote = pair.both(PROMPT, do_sample=False)
        assert torch.equal(remote, whole)
        (found,) = of(WrongAnswers, events)
        assert str(found.span) == SPANS[hop] and len(found.witnesses) == 2
        assert not of(DoubtfulTokens, events)
        assert banned(pair) == {found.server: SPANS[hop]}
        runs = liar.runs
        assert torch.equal(*pair.both(PROMPT, do_sample=False))
        assert liar.runs == runs > 0


def test_tokens_that_passed_through_a_later_liar_are_named(pair, monkeypatch):
    """It answers rightly at first; every step is checked afterwards."""
    good_runs = 5
    liar = Liar(monkeypatch, SPANS[0], LIES["zeros"], good_runs=good_runs)
    with client(pair, every_step=True) as (pair, events):
        session = pair.remote.blocks.open_session()
        torch.manual_seed(0)
        session.step(BlockInput(torch.randn(1, 8, HIDDEN)))
        first_wrong = 8 + good_runs - 1
        while not of(WrongAnswers, events):
            assert session.length < 30, "the liar is found"
            session.step(BlockInput(torch.randn(1, 1, HIDDEN)))
            finish_checks(session)
        length = session.length
        runs = liar.runs
        session.step(BlockInput(torch.randn(1, 1, HIDDEN)))
        assert liar.runs == runs  # others go on
        (doubtful,) = of(DoubtfulTokens, events)
        assert doubtful.first <= first_wrong < doubtful.end <= length + 1
        assert session.stats.doubtful_tokens == doubtful.end - doubtful.first
        session.close()


def test_honest_servers_of_all_kinds_are_never_banned(pair):
    """Every step is checked, by servers of other quantisations where chance has it."""
    int8 = pair.servers.start(*SPANS, quant="int8", throughput=400.0)
    try:
        with client(pair, every_step=True) as (pair, events):
            checks = 0
            for seed in (1, 2):
                torch.manual_seed(seed)
                batch_size = 1 + seed % 3
                mask = torch.ones(batch_size, 24, dtype=torch.long)
                mask[-1, :seed] = 0
                session = pair.remote.blocks.open_session()
                session.step(BlockInput(torch.randn(batch_size, 24, HIDDEN), mask))
                finish_checks(session)
                for number in range(NEW_TOKENS):
                    if number == NEW_TOKENS // 2:
                        session.reorder(torch.arange(batch_size).flip(0))
                        session.crop(2)
                        mask = mask.flip(0)[:, :-2]
                    mask = torch.cat([mask, torch.ones(batch_size, 1, dtype=torch.long)], 1)
                    session.step(BlockInput(torch.randn(batch_size, 1, HIDDEN), mask))
                    finish_checks(session)
                checks += session.stats.checks
                session.close()
            assert checks >= 15
            assert not events
    finally:
        for server in int8:
            pair.servers.stop(server)


@pytest.mark.promise("nobody can accuse an honest server")
def test_honest_servers_cannot_be_accused(pair):
    """Evidence that an attacker makes of what an honest server has signed."""
    with client(pair) as (pair, _):
        swarm = pair.remote.blocks.swarm
        accused = pair.servers.records()[0]

        async def accuse() -> list[bool]:
            await swarm.view(0.0)
            return [await TELL(AccusationClient(swarm), accused.peer_id, accused.span, HIDDEN) for _ in range(3)]

        assert background.run(accuse()) == [False] * 3


def test_a_liar_is_shown_to_the_whole_swarm(pair, monkeypatch):
    """Another client, which never saw it lie, does not use it any more."""
    with client(pair) as (pair, events):
        Liar(monkeypatch, SPANS[1], LIES["scaled"])
        assert torch.equal(*pair.both(PROMPT, do_sample=False))
        (found,) = of(WrongAnswers, events)
        swarm = pair.remote.blocks.swarm

        def evidence() -> list[pb.Evidence]:
            return [found for _, said in background.run(swarm.accusations()) for found in said.evidence]

        wait_for(evidence, "a server has published the evidence")
    monkeypatch.undo()  # it answers rightly from now on
    with client(pair) as (pair, events):
        session = pair.remote.blocks.open_session()
        session.step(BlockInput(torch.randn(1, 8, HIDDEN)))
        wait_for(lambda: banned(pair) == {found.server: SPANS[1]}, "who never saw it lie has banned it")
        session.close()
        assert not events
