"""Only members that have the group's key are let into a group between machines, and only if the group pays."""

from __future__ import annotations

import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swarm_server.core.config import ServerConfig
from swarm_server.group import forming, links
from swarm_server.group.forming import GroupLeader, GroupRefused, require_payoff
from swarm_server.group.group_key import read_group_key
from swarm_server.group.handshake import HandshakeFailed, Hello
from swarm_server.group.links import Deal, LeaderLinks, MemberLink, NotSealed
from swarm_server.group.members import follow
from swarm_server.group.payoff import Payoff, measured
from swarm_server.group.remote import Lobby, RemoteGroup, connected_to_leader
from swarm_server.node.addresses import free_port
from tests.swarm.waiting import wait_for

pytestmark = pytest.mark.skipif(links.library() is None, reason="no compiled kernel")

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
HELLO = Hello("int8", "torch.float32", "one")
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "group.md"


@contextmanager
def waiting_leader(members: int = 2) -> Iterator[tuple[str, Callable[[], RemoteGroup]]]:
    """A leader that waits for followers: its address, and a function that waits for its group."""
    address, formed = f"127.0.0.1:{free_port('127.0.0.1')}", []
    lobby = Lobby(address, KEY, HELLO)

    def group() -> RemoteGroup:
        if not formed:
            links = wait_for(
                lambda: len(waiting := lobby.waiting()) == members - 1 and waiting, "all members are there"
            )
            lobby.take(links)
            formed.append(RemoteGroup(LeaderLinks(links, Deal.by_speed([1.0] * members)), [1e9] * members))
        return formed[0]

    yield address, group
    lobby.close()
    for each in formed:
        each.close()


def follower(address: str, key: bytes = KEY, hello: Hello = HELLO) -> MemberLink:
    return connected_to_leader(address, key, hello)


def test_strangers_are_refused_and_members_are_let_in(caplog: pytest.LogCaptureFixture) -> None:
    with waiting_leader(members=3) as (address, group):
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n".ljust(100))
            wait_for(
                lambda: "is not let into the group: the other end is no member of a group" in caplog.text, "refusal"
            )
        with socket.create_connection(("127.0.0.1", port)) as older:
            older.sendall(b"swarm-group-3\n".ljust(100))
            wait_for(lambda: "group: the other member has another version of this program" in caplog.text, "refusal")
        with pytest.raises(HandshakeFailed, match=f"cannot follow {address}: the other end has another group key"):
            follower(address, OTHER_KEY)
        with pytest.raises(HandshakeFailed, match="the other has quant int8, and this one int4"):
            follower(address, hello=replace(HELLO, quant="int4"))
        with pytest.raises(HandshakeFailed, match="the other has revision one, and this one other"):
            follower(address, hello=replace(HELLO, revision="other"))
        follower(address).close()  # and its place is free again
        second, third = follower(address), follower(address)
        assert group().find_failure() is None and second.is_connected()
        third.close()
        wait_for(lambda: group().find_failure() is not None, "the leader notices, without a product")
        wait_for(lambda: "let into the group: the other end has another group key" in caplog.text, "refusal")
        wait_for(lambda: "the other has quant int4, and this one int8" in caplog.text, "refusal")


def test_the_group_measures_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_server.group.payoff._ROWS", 64)
    monkeypatch.setattr("swarm_server.group.payoff._MEASURE_S", 0.0)
    with waiting_leader() as (address, group):
        thread = threading.Thread(target=lambda: follow(lambda *_: None, follower(address)))
        thread.start()
        payoff = measured(group().links.links, "int4", 5e6, 64)
        assert len(payoff.bytes_per_s) == 2 and min(payoff.bytes_per_s) > 0
        assert min(*payoff.rtt_s, *payoff.exchange_s, *payoff.free_bytes) > 0
        group().close()
        thread.join()


def pipe() -> tuple[socket.socket, MemberLink, MemberLink, socket.socket]:
    """Two ends of a link between which a stranger sits: the stranger's two sockets, and the ends."""
    (near, a), (far, b) = socket.socketpair(), socket.socketpair()
    for each in (near, far):
        each.settimeout(10)
    sender, receiver = (MemberLink(end, None, number, 10.0) for number, end in enumerate((a, b)))
    sender.seal(KEY, OTHER_KEY)
    receiver.seal(OTHER_KEY, KEY)
    return near, sender, receiver, far


@pytest.mark.parametrize("position", [0, 3, 4, 40, -1])  # in the length, the text and the tag
def test_bytes_that_are_changed_or_repeated_on_the_way_are_refused(position: int, monkeypatch) -> None:
    monkeypatch.setattr(links, "_prepare", lambda _connection: None)  # pairs are no TCP sockets
    near, sender, receiver, far = pipe()
    text, received = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    sender.send(text)
    sealed = near.recv(1000)
    assert len(sealed) == 4 + 100 + 16 and bytes(text[:8].tolist()) not in sealed
    far.sendall(sealed)
    receiver.receive(received)
    assert torch.equal(received, text)
    far.sendall(sealed)  # again
    with pytest.raises(NotSealed, match="bytes that the group's key has not sealed"):
        receiver.receive(received)
    near, sender, receiver, far = pipe()
    sender.send(text)
    changed = bytearray(near.recv(1000))
    changed[position] ^= 1
    far.sendall(changed + bytes(1000))
    with pytest.raises(NotSealed):
        receiver.receive(received)


def test_whether_a_group_pays() -> None:
    near = Payoff(44e6, (0.05e-3,), (0.05e-3,), (15e9, 15e9), (8e9, 8e9))
    # 44 MB at 15 GB/s take 2.933 ms; half of them, and 4 × 0.05 ms, take 1.667 ms
    assert near.gain == pytest.approx(2.9333 / 1.6667, rel=1e-3)
    require_payoff(near, is_forced=False)
    far = replace(near, rtt_s=(0.5e-3,), exchange_s=(0.6e-3,))
    assert far.gain == pytest.approx(2.9333 / 3.8667, rel=1e-3)
    with pytest.raises(GroupRefused, match=r"would reach only 0\.76 × .*RTT 0\.50 ms.*--group-always forms it anyway"):
        require_payoff(far, is_forced=False)
    require_payoff(far, is_forced=True)
    unequal = replace(near, bytes_per_s=(15e9, 5e9))  # the leader has three quarters of the rows: 2.2 ms and 0.2 ms
    assert unequal.gain == pytest.approx(2.9333 / 2.4, rel=1e-3)
    three = Payoff(44e6, (5e-3, 0.05e-3), (5e-3, 0.05e-3), (15e9, 15e9, 15e9), (8e9, 9e9, 10e9))
    assert three.best_followers(2) == [1]  # an exchange with the other takes longer than a block
    assert three.of([1]) == replace(near, free_bytes=(8e9, 10e9))
    assert far.best_followers(1) == []


def test_the_page_of_groups_has_gains_by_the_formula() -> None:
    rows = re.findall(r"^\| \S+ B \| (\d+) \| (\d+) MB \| (\d+) GB/s \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for hidden_size, block_mb, rate_gb, gains in rows:
        rates = (1e9 * float(rate_gb),) * 2
        for gain, (rtt_s, bytes_per_s) in zip(
            gains.split(" | "), [(1e-4, 1.25e9), (1e-4, 125e6), (3e-4, 125e6), (1e-3, 125e6)], strict=True
        ):
            exchange_s = rtt_s + 8 * int(hidden_size) / bytes_per_s
            payoff = Payoff(1e6 * float(block_mb), (rtt_s,), (exchange_s,), rates, (inf, inf))
            assert gain == f"{payoff.gain:.2f}", (hidden_size, rate_gb, rtt_s)


def test_blocks_fit_into_the_memory_of_all_members() -> None:
    links_ = LeaderLinks([], Deal.by_speed([3.0, 1.0]))
    assert RemoteGroup(links_, [0.0, 10e9]).block_bytes_in(6e9) == 8e9  # three quarters of 8 GB are 6 GB
    assert RemoteGroup(links_, [0.0, 1e9]).block_bytes_in(6e9) == 3.2e9  # the follower's quarter is 0.8 GB
    assert RemoteGroup(links_, [0.0, 1e9]).own_share == 0.75


def test_the_file_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "group.key"
    with pytest.raises(
        ValueError, match=r"cannot use the group key .*: No such file or directory; the leader of a group"
    ):
        read_group_key(path, create=False)
    key = read_group_key(path, create=True)
    assert len(key) == 32 and read_group_key(path, create=True) == read_group_key(path, create=False) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("secret")
    with pytest.raises(ValueError, match="is no group key: expected 64 hexadecimal digits"):
        read_group_key(path, create=True)


def test_members_that_start_together_on_one_machine_have_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "group.key"
    first = read_group_key(path, create=True)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda _path: False)  # the second has looked before the first wrote the file
        assert read_group_key(path, create=True) == first
    path.unlink()
    start, keys = threading.Barrier(8), []

    def read() -> None:
        start.wait()
        keys.append(read_group_key(path, create=True))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1


def test_an_address_at_which_nobody_can_listen() -> None:
    with pytest.raises(ValueError, match=r"wait for members of the group at 192\.0\.2\.1:31400: .*expected a free"):
        Lobby("192.0.2.1:31400", KEY, HELLO)


@contextmanager
def following(address: str, hello: Hello) -> Iterator[None]:
    """A follower in a thread, which comes back to the leader after each group until the context ends."""
    ended, links_ = threading.Event(), []

    def live() -> None:
        while not ended.is_set():
            links_.append(follower(address, hello=hello))
            follow(lambda *_: None, links_[-1])
            links_[-1].close()

    thread = threading.Thread(target=live)
    thread.start()
    yield
    ended.set()
    links_[-1].close()
    thread.join()


def test_a_group_forms_again_with_those_who_are_left_and_those_who_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow follower is left out for ten minutes, and none waits for a follower that has gone."""
    address, key = f"127.0.0.1:{free_port('127.0.0.1')}", tmp_path / "group.key"
    key.write_text(KEY.hex())
    speeds = [3e9, 1e9, 2e9]
    monkeypatch.setattr(forming, "hosted_bytes", lambda *_: [44e6])
    monkeypatch.setattr(
        forming,
        "measured",
        lambda links_, *_: Payoff(
            44e6,
            *[(0.05e-3,) * len(links_)] * 2,
            (speeds[0], *(speeds[int(link.name)] for link in links_)),
            (1e9,) * (len(links_) + 1),
        ),
    )
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.5
        return now_s

    config = ServerConfig(group_size=3, group_listen=address, group_key=key)
    leader = GroupLeader(config, Lobby(address, KEY, HELLO), KEY, clock)
    checkpoint = SimpleNamespace(family=SimpleNamespace(hidden_size=8))

    def formed(by_name: dict[str, float], waiting: int | None = None) -> RemoteGroup:
        wait_for(lambda: len(leader._lobby.waiting()) == (waiting or len(by_name)), "the followers wait")
        group = leader.form(checkpoint, lambda: True)
        shares = zip([link.name for link in group.links.links], group.links.deal.shares[1:], strict=True)
        assert dict(shares) == pytest.approx(by_name, abs=1e-4)
        return group

    first, second = (replace(HELLO, name=name) for name in "12")
    with following(address, first):
        with following(address, second):
            group = formed({"1": 1 / 6, "2": 1 / 3})
            assert not leader.should_form_again()
            group.close()
        group = formed({"1": 1 / 4})  # the second has gone
        with following(address, second):
            wait_for(leader.should_form_again, "the second has come back")
            group.close()
            group = formed({"1": 1 / 6, "2": 1 / 3})
            slow = 1 + [link.name for link in group.links.links].index("1")
            group._watch = SimpleNamespace(look=lambda: slow)
            assert "has made it slow for long" in str(group.find_failure())
            group.close()
            group = formed({"2": 2 / 5}, waiting=2)
            wait_for(lambda: leader._lobby.waiting(), "the slow one waits")
            wait_for(lambda: "slow for long; it may have a place again in 10 min" in caplog.text, "it knows why")
            assert not leader.should_form_again()
            now_s += 600
            assert leader.should_form_again()
            group.close()
    leader._lobby.close()
