"""The members of a named group: where they wait for one another, and who leads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_protocol.dht.records import GroupCandidate
from swarm_protocol.errors import CheckpointError, JoinRefused, NoSwarm
from swarm_server import group_life
from swarm_server.core.config import ServerConfig
from swarm_server.group import following, forming, links, members, remote
from swarm_server.group.following import Follower
from swarm_server.group.forming import GroupLeader, _LeftOut
from swarm_server.group.handshake import HandshakeFailed, Hello
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberLink
from swarm_server.group.members import Dismissal, FollowerLeftOut, dismiss
from swarm_server.group.payoff import Payoff
from swarm_server.group.remote import Lobby, connected_to_leader
from swarm_server.group_life import GroupProcess
from tests.swarm.waiting import wait_for

pytestmark = pytest.mark.skipif(links.library() is None, reason="no compiled kernel")

KEY = bytes(range(32))
HELLO = Hello("int8", "torch.float32")


@contextmanager
def member(announced_host: str | None = None, host: str = "127.0.0.1") -> Iterator[tuple[GroupLeader, Lobby]]:
    """A member of a named group that has not chosen a leader yet."""
    lobby = Lobby(host, KEY, replace(HELLO, name="own"), announced_host)
    yield GroupLeader(ServerConfig(group="lab", group_size=2, group_key=Path("unread")), lobby, KEY), lobby
    lobby.close()


def test_nobody_waits_for_a_process_that_does_not_lead() -> None:
    with member() as (leader, lobby):
        with pytest.raises(GroupEnded, match="no leader of the group answers"):
            connected_to_leader(lobby.address, KEY, HELLO, 0.01)
        leader.lead()
        link = connected_to_leader(lobby.address, KEY, HELLO, 10)
        wait_for(lobby.waiting, "the follower waits")
        leader.give_way()
        wait_for(lambda: not link.is_connected(), "the follower is free")


def test_of_two_leaders_one_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forming, "_ANNOUNCE_S", 0.0)
    others, published = iter([[], [GroupCandidate("before", "", True)]]), []

    class Registry:
        async def publish(self, candidate: GroupCandidate) -> None:
            published.append(candidate)

        async def read(self) -> list[GroupCandidate]:
            return next(others)

    with member() as (leader, lobby):
        leader.lead()
        asyncio.run(leader.keep_announced(SimpleNamespace(candidates=lambda *_: Registry()), b""))
        assert not leader.leads and leader.should_form_again()
        assert published == [GroupCandidate("own", lobby.address, True)] * 2


def test_the_address_of_a_member_is_one_that_others_reach() -> None:
    with member("192.0.2.7", host="0.0.0.0") as (leader, _lobby):
        host, _, port = leader.candidate().address.rpartition(":")
        assert host == "192.0.2.7"
        leader.lead()
        connected_to_leader(f"127.0.0.1:{port}", KEY, HELLO, 10)


def test_a_follower_waits_while_the_name_of_the_leader_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), socket.gaierror(socket.EAI_NONAME, "No")])

    def create_connection(*_arguments: object) -> socket.socket:
        raise next(failures)

    monkeypatch.setattr(remote, "_RETRY_S", 0.0)
    monkeypatch.setattr(remote.socket, "create_connection", create_connection)
    with pytest.raises(ValueError, match="the leader's host near:1 is unknown: No"):
        connected_to_leader("near:1", KEY, HELLO)


def dismissed(reason: str, dismissal: Dismissal) -> Callable[[], object]:
    """A follower's life until the leader has told it why it has no place."""

    @contextmanager
    def loader() -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    def follow() -> bool:
        with member() as (leader, lobby), ThreadPoolExecutor(1) as pool:
            leader.lead()
            told = pool.submit(lambda: dismiss(wait_for(lobby.waiting, "the follower waits")[0], dismissal, reason))
            told.add_done_callback(lambda _done: leader.give_way())
            return Follower(lobby.address, KEY, HELLO, loader).follow(10)

    return follow


def test_followers_without_a_place_are_told_why(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for ever for a group that is faster without it, or with which it cannot compute."""
    assert dismissed("it was slow", Dismissal.WAIT)()
    assert "the leader has no place for this follower, which waits: it was slow" in caplog.text
    with pytest.raises(FollowerLeftOut, match=r"cannot follow .*: the group would reach only little"):
        dismissed("the group would reach only little", Dismissal.LEAVE)()
    with pytest.raises(HandshakeFailed, match=r"cannot follow .*: this member has loaded other weights"):
        dismissed("this member has loaded other weights", Dismissal.END)()


class WaitingLink:
    """Stands for the link to a follower that waits in the lobby."""

    failure, has_loaded, blamed, loaded = "", False, MemberLink.blamed, MemberLink.loaded

    def __init__(self, name: str, host: str = "") -> None:
        self.name, self.host = name, host

    def close(self) -> None:
        pass


def test_followers_that_are_left_out_are_told_once_and_start_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Dismissal, str]] = []
    monkeypatch.setattr(forming, "dismiss", lambda link, *order: told.append((link.name, *order)))
    slow, near, far = map(WaitingLink, ("slow", "near", "far"))
    now_s, waiting = 0.0, [slow, near]
    lobby = SimpleNamespace(waiting=lambda: waiting, open=lambda: None)
    leader = GroupLeader(ServerConfig(group_size=3), lobby, KEY, lambda: now_s)
    leader._group, leader._left_out = (
        SimpleNamespace(links=SimpleNamespace(members=2)),
        {"slow": _LeftOut(20.0, "it is slow")},
    )
    assert leader.should_form_again() and leader.should_form_again()
    assert [each[:2] for each in told] == [("slow", Dismissal.WAIT)] and told[0][2].endswith("in 1 min")
    leader._chosen([near, far], SimpleNamespace(best_followers=lambda _count: [0]))
    assert not leader.should_form_again()
    now_s, waiting = 600.0, [WaitingLink("far")]
    assert not leader.should_form_again()
    assert [each[:2] for each in told[1:]] == [("far", Dismissal.LEAVE)] * 2
    waiting.append(near)
    assert leader.should_form_again()


def test_a_machine_whose_followers_fail_waits_longer_each_time_until_one_has_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A follower that fails at every load would have the group formed again and again; its process has other names."""
    told: list[tuple[str, Dismissal, str]] = []
    monkeypatch.setattr(forming, "dismiss", lambda link, *order: told.append((link.name, *order)))
    monkeypatch.setattr(forming, "_REJOIN_S", 0.0)
    monkeypatch.setattr(forming, "hosted_bytes", lambda *_: [1e6])
    monkeypatch.setattr(forming, "formed_links", lambda _links, deal: LeaderLinks([], deal))
    now_s, waiting, fails, names = 0.0, [], True, itertools.count()

    def measured(links_: list[WaitingLink], *_more: object) -> Payoff:
        for link in links_:
            if fails:
                with link.blamed("load blocks 0:6"):
                    raise GroupEnded("out of memory")
            link.loaded()
        rates = (1e9,) * (len(links_) + 1)
        return Payoff(1e9, (1e-6,) * len(links_), (1e-6,) * len(links_), rates, rates)

    monkeypatch.setattr(forming, "measured", measured)
    lobby = SimpleNamespace(
        waiting=lambda: list(waiting),
        open=lambda: None,
        shut=lambda: None,
        take=lambda links_: [waiting.remove(link) for link in links_],
    )
    leader = GroupLeader(ServerConfig(group="lab", group_size=3, group_key=Path("unread")), lobby, KEY, lambda: now_s)
    leader.lead()

    def come(host: str = "192.0.2.7") -> None:
        waiting.append(WaitingLink(str(next(names)), host))

    def form() -> None:
        leader.form(SimpleNamespace(family=SimpleNamespace(hidden_size=8)), lambda: True)

    def fail(pause_s: int) -> None:
        caplog.clear()
        come()
        with pytest.raises(GroupEnded, match=r"the member at 192\.0\.2\.7 cannot load blocks 0:6: out of memory"):
            form()
        come()
        form()  # alone
        line = "the member at 192.0.2.7 cannot load blocks 0:6: out of memory; followers on that machine may join"
        assert f"{line} again in {pause_s} s" in caplog.text
        assert not leader.should_form_again() and told[-1][1] == Dismissal.WAIT
        assert "cannot load blocks 0:6: out of memory; it may have a place again in" in told[-1][2]

    for pause_s in (30, 60, 120):
        fail(pause_s)
        now_s += pause_s
        assert leader.should_form_again()
        waiting.clear()
    fails = False
    come()
    form()
    come("192.0.2.8")
    assert leader.should_form_again()
    form()
    fails = True
    fail(30)
    come("192.0.2.8")
    assert leader.should_form_again()  # with the other machine


def test_followers_on_this_machine_end_if_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = iter([True, False]), []

    def start(_make_loader: object, ends: links.LinkEnds, member: int) -> SimpleNamespace:
        if not next(started):
            raise OSError("no more processes")
        theirs = ends.follower.dup()
        return SimpleNamespace(join=lambda _limit_s: ended.append(theirs.recv(1)), is_alive=lambda: False)

    monkeypatch.setattr(members, "_started", start)
    with pytest.raises(OSError, match="no more processes"):
        members.LocalGroup(lambda: None, 3)
    assert ended == [b""]  # its link is closed, and the leader has waited for its end


@pytest.mark.parametrize("kind", [CheckpointError, ValueError])
def test_a_follower_on_this_machine_says_why_it_cannot_load(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(_load: object, _link: object) -> None:
        raise kind("the file is gone")

    monkeypatch.setattr(members, "MemberLink", lambda *_ends: None)
    monkeypatch.setattr(members, "follow", follow)
    monkeypatch.setattr(members.signal, "signal", lambda *_arguments: None)
    own, theirs = socket.socketpair()
    with own, theirs, pytest.raises(SystemExit, match="on this machine cannot go on: the file is gone"):
        members._follow(lambda: nullcontext(None), own, os.dup(theirs.fileno()))


def test_a_process_that_is_left_out_lets_nobody_in_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "group.key").write_text(KEY.hex())
    config = ServerConfig(group="lab", group_size=2, group_key=tmp_path / "group.key")
    monkeypatch.setattr(group_life, "_revision", lambda _config: "")
    process = GroupProcess(config)

    async def leader_elsewhere() -> str:
        process._leader = process._new_leader("127.0.0.1")
        return "192.0.2.1:9"

    def follow(_address: str) -> bool:
        raise FollowerLeftOut("too far")

    monkeypatch.setattr(process, "_leader_elsewhere", leader_elsewhere)
    monkeypatch.setattr(process, "_follow", follow)
    with closing(asyncio.new_event_loop()) as loop, pytest.raises(FollowerLeftOut):
        process.lead(loop)
    assert process._leader is not None
    wait_for(lambda: process._leader._lobby._listener.fileno() == -1, "the lobby is closed")
    alone = config.without_group()
    assert not alone.is_in_group and (alone.group, alone.group_key) == (None, None)


def test_a_member_that_has_followed_waits_for_the_swarm_whose_only_peer_was_the_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_life, "_revision", lambda _config: "")
    monkeypatch.setattr(group_life, "_RETRY_S", 0.0)
    config = ServerConfig(group="lab", group_size=2, group_key=tmp_path / "group.key")
    unreachable = NoSwarm("no initial peer answered: the leader")

    def led(*met: str | Exception | None) -> GroupLeader | None:
        """The life of a member that meets these leaders one after the other; None: it leads."""
        process, meetings = GroupProcess(config), iter(met)
        process._leader = process._new_leader("127.0.0.1")

        async def leader_elsewhere() -> str | None:
            if isinstance(address := next(meetings), Exception):
                raise address
            if address is None:
                process._leader.lead()
            return address

        monkeypatch.setattr(process, "_leader_elsewhere", leader_elsewhere)
        monkeypatch.setattr(process, "_follow", lambda _address: True)
        with closing(asyncio.new_event_loop()) as loop, closing(process._leader):
            return process.lead(loop)

    assert led("192.0.2.1:9", unreachable, unreachable, None) is not None
    assert caplog.text.count("has ended, and no initial peer answered: the leader; trying again in 0 s") == 2
    for error, met in ((NoSwarm, [unreachable]), (JoinRefused, ["192.0.2.1:9", JoinRefused("the clock is wrong")])):
        with pytest.raises(error):
            led(*met)


def test_silent_connections_keep_nobody_out() -> None:
    with member() as (leader, lobby), ExitStack() as cleanup:
        leader.lead()
        host, _, port = lobby.address.rpartition(":")
        silent = [cleanup.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)]
        link = connected_to_leader(lobby.address, KEY, HELLO, 0.5)  # at the first attempt
        wait_for(lobby.waiting, "the follower waits")
        assert link.is_connected()
        silent[0].settimeout(10)
        while silent[0].recv(100):  # the leader has closed it, after its own key
            pass


def test_nobody_is_greeted_any_more_once_the_lobby_is_shut() -> None:
    with member() as (leader, lobby):
        leader.lead()
        host, _, port = lobby.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as silent:
            assert silent.recv(100)  # the leader's key
            leader.give_way()
            assert silent.recv(100) == b""
        wait_for(lambda: not lobby._greeted, "the greeting has ended")
        leader.lead()
        lobby._lock = ShuttingLock(lobby)
        with socket.create_connection((host, int(port)), 5) as late:
            assert late.recv(100) == b""


class ShuttingLock:
    """The lock of a lobby that another thread shuts just before somebody gets the lock for the first time."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby, self._lock = lobby, lobby._lock

    def __enter__(self) -> None:
        if self._lobby._lock is self:
            self._lobby._lock = self._lock
            self._lobby.shut()
        self._lock.acquire()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


def test_a_follower_without_a_place_looks_for_the_leader_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with member() as (leader, lobby):
        leader.lead()
        Follower(lobby.address, KEY, HELLO, lambda: None)._follow_once(lambda *_: None, 10, wait_s=0.01)
    assert f"waiting for a place in the group of the leader at {lobby.address}" in caplog.text
    assert "the group has ended: a member of the group has ended" in caplog.text


def test_a_follower_tries_again_if_a_connection_breaks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems report a reset connection when its options are set."""
    failures, shake_hands = iter([OSError("Invalid argument")]), remote.shake_hands

    def shake(*arguments: object, leads: bool, **options: object) -> MemberLink:
        if not leads and (failure := next(failures, None)):
            raise failure
        return shake_hands(*arguments, leads=leads, **options)

    monkeypatch.setattr(remote, "_RETRY_S", 0.0)
    monkeypatch.setattr(remote, "shake_hands", shake)
    with member() as (leader, lobby):
        leader.lead()
        assert connected_to_leader(lobby.address, KEY, HELLO, 10).is_connected()


def test_signals_are_heard_as_before_once_a_follower_has_ended() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert following._until_signal(lambda: None)
    assert not following._until_signal(lambda: (signal.raise_signal(signal.SIGTERM), threading.Event().wait(0.01)))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_follower_in_the_background_of_a_shell_does_not_hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert following._until_signal(lambda: signal.raise_signal(signal.SIGINT))
