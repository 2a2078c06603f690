"""A server that hosts one span after the other: what its swarm reads in which order, whatever goes wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import NoSwarm
from swarm_protocol.process.routine import repeat
from swarm_protocol.span import Span
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.metrics.throughput import Speeds
from swarm_server.node import moving
from swarm_server.node.moving import PeerMonitor, SpanMover, num_hosted
from swarm_server.node.presence import RecordPublisher
from swarm_server.node.states import Draining, Ended, Joined, Loading, Serving, Starting, Unloaded
from swarm_server.verification.blocklist import Blocklist
from tests.unit.support import run, server_record

pytestmark = pytest.mark.usefixtures("quick_collections")
HERE, THERE = Span(0, 4), Span(4, 8)
JOINING, ONLINE, DRAINING, OFFLINE = ServerState.JOINING, ServerState.ONLINE, ServerState.DRAINING, ServerState.OFFLINE


@dataclass
class FakeDht:
    """Takes records, and knows the servers it is given beside the last record."""

    others: list[ServerRecord] = field(default_factory=list)
    published: list[ServerRecord] = field(default_factory=list)
    peer_id = "own"
    is_alive = True

    async def publish(self, record: ServerRecord) -> bool:
        self.published.append(record)
        return self.is_alive

    async def view(self, _model: str, _num_blocks: int) -> SwarmView:
        return SwarmView.of([*self.others, *self.published[-1:]])

    @property
    def said(self) -> list[tuple[ServerState, Span, Span | None]]:
        return [(record.state, record.span, record.next_span) for record in self.published]


@dataclass
class FakeMembership:
    dht: FakeDht
    host = "127.0.0.1"
    daemons: list[NoSwarm | None] = field(default_factory=list)  # what comes of starting another

    async def keep(self) -> bool:
        return False

    async def restart_daemon(self) -> None:
        error = self.daemons.pop(0)
        if error is not None:
            raise error


class FakeProbe:
    def __init__(self) -> None:
        self.rtts_s, self.bytes_per_s = {"near": 0.01}, 4096.0

    async def living(self, view: SwarmView, _own: ServerRecord | None) -> SwarmView:
        return view


class FakeHost:
    def __init__(self, num_sessions: int) -> None:
        self.num_sessions = num_sessions
        self.services = SimpleNamespace(scheduler=SimpleNamespace(num_waiting=0), training=[])
        self.left_s: list[float] = []

    async def leave(self, timeout_s: float) -> None:
        self.left_s.append(timeout_s)


class FakeRuntime:
    speeds, cache_tokens, cache_tokens_left, queue_delay_s = Speeds(20.0, 300.0), 9, 7, 0.5

    def __init__(self, span: Span, num_sessions: int = 0) -> None:
        self.span = span
        self.host = FakeHost(num_sessions)
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class FakeLoader:
    """Loads all blocks but the ``broken``."""

    members = 2

    def __init__(self, *broken: Span) -> None:
        self.broken, self.fails = broken, OSError("no such file")
        self.before: weakref.ref | None = None  # what was hosted, and must be gone

    def known_speeds(self, _num_blocks: int) -> Speeds | None:
        return None

    async def load(self, span: Span) -> Span:
        gc.collect()
        assert self.before is None or self.before() is None, "the old blocks are still in memory"
        if span in self.broken:
            raise self.fails
        return span

    async def start(self, span: Span, _channels: object, _sharing: str) -> FakeRuntime:
        return FakeRuntime(span)


class Life:
    """A server between joining and leaving, without network and blocks."""

    def __init__(self, *others: ServerRecord, broken: tuple[Span, ...] = (), **config: object) -> None:
        family = SimpleNamespace(num_blocks=8, hidden_size=16)
        checkpoint = SimpleNamespace(name="model", revision="revision", family=family, files=None)
        self.dht = FakeDht(list(others))
        self.membership = FakeMembership(self.dht)
        self.loader = FakeLoader(*broken)
        starting = Starting(
            ServerConfig(**config),
            SwarmAccess(None),
            checkpoint,
            (torch.device("cpu"),),
            "torch.float32",
            None,
            self.loader,
            Counters(),
        )
        self.counters = starting.counters
        reach = SimpleNamespace(addresses=("127.0.0.1:1",), relay_address="")
        self.joined = Joined(starting, self.membership, None, b"", reach)
        self.monitor = PeerMonitor(self.joined, FakeProbe(), Blocklist())
        self.loading = self.joined.load(HERE)
        self.presence = RecordPublisher(self.joined, FakeProbe(), self.loading)
        self.mover = SpanMover(self.joined, self.monitor, self.presence)

    def serve(self, num_sessions: int = 0) -> FakeRuntime:
        """In the swarm's eyes too."""
        runtime = FakeRuntime(HERE, num_sessions)
        self.presence.enter(self.loading.serve(runtime))
        run(self.presence.publish())
        return runtime


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:
    for name in ("_SETTLE_S", "CONFIRM_S"):
        monkeypatch.setattr(moving, name, 0.0)


def needed_there() -> tuple[ServerRecord, ...]:
    """Blocks 0:4 are held often, 4:8 by one slow server."""
    strong = [server_record(f"strong{number}", "0:4", forward_tokens_per_s=1e3, pinned=True) for number in range(3)]
    return (*strong, server_record("weak", "4:8", tokens_per_s=1.0, forward_tokens_per_s=1.0, pinned=True))


class TestMove:
    def test_the_swarm_hears_of_every_state(self) -> None:
        life = Life(*needed_there())
        old = life.serve()
        run(life.mover.rebalance())
        assert life.dht.said == [
            (ONLINE, HERE, None),
            (ONLINE, HERE, THERE),
            (DRAINING, HERE, THERE),
            (JOINING, THERE, None),
            (ONLINE, THERE, None),
        ]
        assert old.is_closed and old.host.left_s == [ServerConfig.drain_timeout_s]
        assert isinstance(life.presence.state, Serving) and life.presence.sessions is not old.host
        assert life.counters.moves == 1

    def test_it_stays_if_others_would_miss_it(self, monkeypatch) -> None:
        life = Life(*needed_there())
        runtime = life.serve()
        monkeypatch.setattr(moving, "may_leave", lambda *_view: False)
        run(life.mover.rebalance())
        assert life.dht.said[1:] == [(ONLINE, HERE, THERE), (ONLINE, HERE, None)]
        assert not runtime.is_closed and life.presence.sessions is runtime.host

    def test_it_goes_back_for_good_if_the_other_blocks_cannot_be_loaded(self) -> None:
        life = Life(*needed_there(), broken=(THERE,))
        life.serve()
        run(life.mover.rebalance())
        assert life.dht.said[-2:] == [(JOINING, THERE, None), (ONLINE, HERE, None)]
        assert life.dht.published[-1].pinned and life.counters.moves == 0
        num_published = len(life.dht.published)
        run(life.mover.rebalance())
        assert len(life.dht.published) == num_published

    def test_the_old_blocks_are_gone_before_others_are_loaded(self) -> None:
        life = Life(*needed_there())
        life.loader.before = weakref.ref(life.serve())
        run(life.mover.rebalance())
        assert life.dht.said[-1] == (ONLINE, THERE, None)

    @pytest.mark.parametrize("fails", [OSError("no such file"), RuntimeError("out of memory"), MemoryError()])
    def test_who_could_load_no_blocks_at_all_tries_again(self, fails: Exception) -> None:
        life = Life(*needed_there(), broken=(THERE, HERE))
        life.loader.fails = fails
        life.serve()
        for _ in range(2):
            with pytest.raises(type(fails)):
                run(life.mover.rebalance())
            assert isinstance(life.presence.state, Loading)
        life.loader.broken = ()
        run(life.mover.rebalance())
        assert life.dht.said[-1] == (ONLINE, HERE, None) and isinstance(life.presence.state, Serving)

    def test_nobody_finds_sessions_while_other_blocks_load(self) -> None:
        life = Life()
        runtime = life.serve()
        assert life.presence.sessions is runtime.host
        run(life.mover.close())
        assert life.presence.sessions is None and runtime.is_closed
        run(life.mover.close())


class TestDrain:
    def test_the_swarm_hears_of_it_if_there_are_sessions(self) -> None:
        life = Life(drain_timeout_s=3.0)
        runtime = life.serve(num_sessions=2)
        run(life.mover.drain())
        assert life.dht.said[1:] == [(DRAINING, HERE, None)]
        assert runtime.host.left_s == [3.0] and isinstance(life.presence.state, Draining)

    def test_without_sessions_it_is_over_at_once(self) -> None:
        life = Life()
        runtime = life.serve()
        run(life.mover.drain())
        assert life.dht.said[1:] == [] and len(runtime.host.left_s) == 1

    def test_in_the_middle_of_a_move_there_may_be_no_blocks(self) -> None:
        life = Life()
        run(life.mover.drain())
        assert isinstance(life.presence.state, Unloaded) and life.presence.record().state is DRAINING


class TestChoice:
    def test_it_is_looked_at_again_while_others_choose(self) -> None:
        other = server_record("a", "0:4", state=JOINING, tokens_per_s=1.0, forward_tokens_per_s=1.0)
        life = Life(other)
        settled = run(life.mover.settle(life.loading))
        assert settled.record.span == THERE and life.presence.state == settled
        assert life.dht.said == [(JOINING, THERE, None)]

    def test_it_stands_if_nobody_else_chooses(self) -> None:
        life = Life(server_record("a", "4:8"))
        assert run(life.mover.settle(life.loading)) is life.loading and life.dht.published == []

    def test_who_chose_at_the_same_time_may_be_online_already(self) -> None:
        life = Life(server_record("a", "0:4"))
        assert run(life.mover.settle(life.loading)).record.span == THERE
        assert life.dht.said == [(JOINING, THERE, None)]

    def test_servers_of_another_revision_are_not_counted(self) -> None:
        life = Life(server_record("a", "0:4"), server_record("b", "4:8", revision="older"))
        assert [server.peer_id for server in run(life.monitor.view()).servers] == ["a"]
        assert run(life.monitor.choose_span(4)) == THERE

    def test_only_blocks_that_are_given_for_good_are_pinned(self) -> None:
        for config, is_pinned in (({"blocks": HERE}, True), ({"initial_blocks": HERE}, False), ({}, False)):
            assert Life(**config).loading.record.pinned == is_pinned

    def test_more_blocks_than_the_model_has_are_refused(self) -> None:
        assert num_hosted(Life(num_blocks=3).joined.starting) == 3
        with pytest.raises(ValueError, match="9 blocks are more than the model's 8"):
            num_hosted(Life(num_blocks=9).joined.starting)


class TestPresence:
    def test_the_record_has_measurements_while_blocks_are_hosted(self) -> None:
        life = Life()
        assert (life.presence.record().tokens_per_s, life.presence.record().next_hop_rtts_s) == (0.0, {})
        life.serve()
        record = life.presence.record()
        assert (record.tokens_per_s, record.forward_tokens_per_s, record.queue_delay_s) == (20.0, 300.0, 0.5)
        assert (record.cache_tokens, record.cache_tokens_left, record.next_hop_rtts_s) == (9, 7, {"near": 0.01})
        assert record.network_tokens_per_s == 4096.0 / (4 * 16)

    def test_the_record_says_how_many_members_a_group_has(self) -> None:
        life = Life()
        assert life.presence.record().members == 1
        run(life.mover.host(life.loading))
        assert life.presence.record().members == FakeLoader.members

    def test_it_is_quiet_without_sessions_work_and_kept_passes(self) -> None:
        life = Life()
        assert not life.presence.is_quiet()  # it hosts nothing yet
        runtime = life.serve()
        services = runtime.host.services
        assert life.presence.is_quiet()
        services.scheduler.num_waiting = 1
        assert not life.presence.is_quiet()
        services.scheduler.num_waiting, services.training = 0, ["a forward pass"]
        assert not life.presence.is_quiet()
        services.training, runtime.host.num_sessions = [], 1
        assert not life.presence.is_quiet()

    def test_a_given_throughput_is_not_limited_by_the_network(self) -> None:
        life = Life(throughput=5.0)
        life.serve()
        assert life.presence.record().network_tokens_per_s == 0.0

    def test_the_record_is_withdrawn(self) -> None:
        life = Life()
        run(life.presence.withdraw(may_restart=True))
        assert life.dht.said == [(OFFLINE, HERE, None)] and isinstance(life.presence.state, Ended)

    @pytest.mark.parametrize(("is_stopping", "num_warnings"), [(False, 2), (True, 0)])
    def test_daemons_are_restarted_until_none_can_be_started(self, caplog, is_stopping, num_warnings) -> None:
        caplog.set_level(logging.INFO)
        life = Life()
        last = NoSwarm("no memory")
        life.membership.daemons = [None, last]

        async def ended() -> None:
            pass

        life.dht.daemon_ended = ended
        assert run(life.presence.keep_daemon(lambda: is_stopping)) is last
        assert len(life.dht.published) == 1 and life.counters.daemon_restarts == 1
        assert caplog.text.count("the libp2p daemon has ended") == 2
        assert caplog.text.count("nobody can find this server") == num_warnings


def test_a_routine_that_fails_goes_on(caplog) -> None:
    results = iter([None, ValueError("once"), None, "done"])

    async def action() -> str | None:
        result = next(results)
        if isinstance(result, ValueError):
            raise result
        return result

    assert run(repeat(action, (0.0, 0.0))) == "done"
    assert "a server's routine failed" in caplog.text
