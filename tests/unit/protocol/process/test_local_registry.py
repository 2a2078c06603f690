"""The registry by which peers of one machine find each other: of the living, as long as they live, each swarm apart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm_protocol.process import local_registry
from swarm_protocol.process.local_registry import (
    FRESH_S,
    STALE_S,
    LocalRegistry,
    RegistryEntry,
    checked_name,
    is_loopback,
    registered_swarms,
    remove_ended_swarms,
)
from tests.swarm.waiting import wait_for


def address(peer_id: str) -> str:
    return f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"


def change(directory: Path, peer_id: str, **fields: object) -> Path:
    """Rewrites what the entry says, as others would have written it."""
    (path,) = directory.rglob(f"{peer_id}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


def started(pid: int) -> float:
    stat = local_registry._PROCESSES / str(pid) / "stat"
    if not stat.exists():
        return psutil.Process(pid).create_time()
    return int(stat.read_text().rpartition(")")[2].split()[19])


def make_older(path: Path, age_s: float) -> None:
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    """Two servers of this process are registered."""
    registry = LocalRegistry("mine", tmp_path)
    registry.write("good", [address("good")])
    registry.write("other", [address("other")])
    return registry


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def test_what_is_written_is_read(tmp_path: Path, registry: LocalRegistry) -> None:
    assert LocalRegistry("mine", tmp_path).read() == [address("good"), address("other")]
    assert LocalRegistry("mine", tmp_path / "elsewhere").read() == []


def test_a_later_entry_of_a_server_replaces_its_earlier_one(registry: LocalRegistry) -> None:
    registry.write("other", ["/new/p2p/other"])
    assert registry.read() == [address("good"), "/new/p2p/other"]


class TestWhoIsDead:
    @pytest.fixture(autouse=True, params=["with /proc", "without /proc"])
    def system(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "without /proc":
            monkeypatch.setattr(local_registry, "_PROCESSES", tmp_path / "nowhere")
        elif not local_registry._PROCESSES.exists():
            pytest.skip("this system has no /proc")

    def test_a_process_that_is_gone(self, tmp_path: Path, registry: LocalRegistry, process: subprocess.Popen) -> None:
        entry = change(tmp_path, "other", pid=process.pid, started=started(process.pid))
        assert registry.servers()[1] == RegistryEntry("other", (address("other"),), True)
        process.communicate(b"\n")
        assert registry.read() == [address("good")]
        assert not entry.exists()

    def test_a_process_that_has_ended_and_is_not_reaped(
        self, tmp_path: Path, registry: LocalRegistry, process: subprocess.Popen
    ) -> None:
        entry = change(tmp_path, "other", pid=process.pid, started=started(process.pid))
        process.kill()
        is_zombie = lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE  # noqa: E731
        wait_for(is_zombie, "the process is a zombie")
        assert registry.read() == [address("good")]
        assert not entry.exists()

    def test_another_process_that_got_its_pid(self, tmp_path: Path, registry: LocalRegistry) -> None:
        entry = change(tmp_path, "other", started=started(os.getpid()) - 1)
        assert registry.read() == [address("good")]
        assert not entry.exists()

    def test_not_one_that_is_frozen(self, tmp_path: Path, registry: LocalRegistry, process: subprocess.Popen) -> None:
        entry = change(tmp_path, "other", pid=process.pid, started=started(process.pid))
        process.send_signal(signal.SIGSTOP)
        make_older(entry, 10 * STALE_S)
        assert registry.servers()[1].is_alive
        process.send_signal(signal.SIGCONT)

    def test_another_host_says_nothing_by_a_pid(self, tmp_path: Path, registry: LocalRegistry) -> None:
        entry = change(tmp_path, "other", pid=2**30, host="another kernel or container")
        assert registry.servers()[1] == RegistryEntry("other", (address("other"),), True)
        make_older(entry, FRESH_S + 1)
        assert registry.servers()[1] == RegistryEntry("other", (address("other"),), False)
        registry.renew("other", [])
        assert registry.servers()[1].is_alive
        make_older(entry, STALE_S + 1)
        assert registry.read() == [address("good")]
        assert not entry.exists()


def test_a_server_that_was_taken_for_dead_writes_its_entry_again(tmp_path: Path, registry: LocalRegistry) -> None:
    (tmp_path / "mine" / "other.json").unlink()
    assert registry.read() == [address("good")]
    registry.renew("other", [address("other")])
    assert registry.read() == [address("good"), address("other")]


def test_a_loopback_address_of_another_network_leads_nowhere(tmp_path: Path, registry: LocalRegistry) -> None:
    outside = "/ip4/192.0.2.1/tcp/1/p2p/other"
    registry.write("other", [address("other"), outside])
    change(tmp_path, "good", network="another namespace")
    change(tmp_path, "other", network="another namespace")
    assert registry.servers() == [RegistryEntry("good", (), True), RegistryEntry("other", (outside,), True)]
    assert registry.read() == [outside]


@pytest.mark.parametrize(
    ("multiaddr", "expected"),
    [
        ("/ip4/127.0.0.1/tcp/1/p2p/a", True),
        ("/ip4/127.1.2.3/tcp/1/p2p/a", True),
        ("/ip6/::1/tcp/1/p2p/a", True),
        ("/dns4/localhost/tcp/1", True),
        ("/ip4/12.7.0.1/tcp/127", False),
        ("/ip4/0.0.0.0/tcp/1", False),
        ("/ip6/::1234/tcp/1", False),
        ("/dns4/localhost.example.org/tcp/1", False),
    ],
)
def test_loopback(multiaddr: str, expected: bool) -> None:
    assert is_loopback(multiaddr) is expected


def test_the_living_come_first(tmp_path: Path, registry: LocalRegistry) -> None:
    make_older(change(tmp_path, "good", host="another"), FRESH_S + 1)
    assert registry.read() == [address("other"), address("good")]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"addresses": 5}',
        '{"addresses": [], "pid": "x", "started": 1, "host": "HOST", "network": ""}',
        '{"addresses": [], "pid": 1000000000000000000000, "started": 1, "host": "HOST", "network": ""}',
        '{"addresses": [], "pid": 0, "started": 1, "host": "HOST", "network": ""}',
        '{"addresses": [], "pid": 1, "started": 1, "host": "HOST", "network": ""' + 100_000 * " " + "}",
        "[" * 50_000,
        "\udcff",
    ],
)
def test_a_damaged_entry_is_deleted(content: str, tmp_path: Path, registry: LocalRegistry) -> None:
    path = change(tmp_path, "other")
    path.write_text(content.replace("HOST", json.loads(path.read_text())["host"]), errors="surrogateescape")
    assert registry.read() == [address("good")]
    assert not path.exists()


def test_an_entry_can_be_removed(registry: LocalRegistry) -> None:
    registry.remove("good")
    registry.remove("never-registered")
    assert registry.read() == [address("other")]


def test_whether_some_of_those_that_were_read_live_still(tmp_path: Path, registry: LocalRegistry) -> None:
    for name in ("one", "two"):
        registry.write(name, [address(name)])
    known = [entry for entry in registry.servers() if entry.peer_id in ("one", "two")]
    registry.write("newcomer", [address("newcomer")])
    registry.remove("one")
    assert registry.some_live(known)
    registry.remove("two")
    assert not registry.some_live(known)


def test_swarms_are_apart(tmp_path: Path) -> None:
    one, two = LocalRegistry("one", tmp_path), LocalRegistry("two", tmp_path)
    one.write("peer1", [address("peer1")])
    two.write("peer2", [address("peer2")])
    assert (one.read(), two.read()) == ([address("peer1")], [address("peer2")])
    one.remove("peer2")
    one.remove("peer1")
    assert (one.read(), two.read()) == ([], [address("peer2")])


@pytest.mark.parametrize("name", ["a", "default", "A-b_c.9", "0" * 64])
def test_good_names(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "../up", "a b", "a\n", "ä", "0" * 65, "a\0"])
def test_bad_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"swarm name .* is not usable: expected 1 to 64 letters, digits"):
        LocalRegistry(name, tmp_path)


class TestLock:
    async def test_lets_one_in_at_a_time(self, tmp_path: Path) -> None:
        inside = asyncio.Event()

        async def second() -> None:
            async with LocalRegistry("mine", tmp_path).locked() as is_held:
                assert is_held
                inside.set()

        async with LocalRegistry("mine", tmp_path).locked() as is_held:
            assert is_held
            entering = asyncio.ensure_future(second())
            with pytest.raises(asyncio.TimeoutError):  # if the lock did not hold, it would be in at once
                await asyncio.wait_for(inside.wait(), 0.2)
        await entering

    async def test_who_holds_it_for_too_long_is_passed_by(self, tmp_path: Path) -> None:
        async with (
            LocalRegistry("mine", tmp_path).locked(),
            LocalRegistry("mine", tmp_path).locked(timeout_s=0.1) as is_held,
        ):
            assert not is_held
        async with LocalRegistry("mine", tmp_path).locked(timeout_s=0.1) as is_held:
            assert is_held

    async def test_of_one_swarm_does_not_hold_up_another(self, tmp_path: Path) -> None:
        async with (
            LocalRegistry("one", tmp_path).locked(),
            LocalRegistry("two", tmp_path).locked(timeout_s=0) as is_held,
        ):
            assert is_held

    async def test_a_failure_under_it_releases_it(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            async with LocalRegistry("mine", tmp_path).locked():
                1 / 0  # noqa: B018
        async with LocalRegistry("mine", tmp_path).locked(timeout_s=0) as is_held:
            assert is_held


def test_swarms_with_servers_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert registered_swarms() == []
    for swarm in ("two", "one", "three"):
        LocalRegistry(swarm).write(swarm, [address(swarm)])
    LocalRegistry("three").remove("three")
    assert registered_swarms() == ["one", "two"]


async def test_what_ended_swarms_leave_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "swarm" / "swarms"
    for swarm in ("living", "ended", "starting"):
        async with LocalRegistry(swarm).locked():
            LocalRegistry(swarm).write(swarm, [address(swarm)])
    LocalRegistry("ended").remove("ended")
    LocalRegistry("starting").remove("starting")
    for name in (".peer.json.abc.partial", "peer.123"):  # of a process that was killed while it wrote
        (directory / "ended" / name).touch()
    async with LocalRegistry("starting").locked():
        remove_ended_swarms()
    assert {path.name for path in directory.iterdir()} == {"living", "starting"}
    async with LocalRegistry("ended").locked() as is_held:
        assert is_held


async def test_who_waits_for_the_lock_of_a_removed_directory_makes_another(tmp_path: Path) -> None:
    async with LocalRegistry("mine", tmp_path).locked():
        waiting = asyncio.ensure_future(LocalRegistry("mine", tmp_path).locked(30).__aenter__())
        await asyncio.sleep(0)
        (tmp_path / "mine" / "lock").unlink()
        (tmp_path / "mine").rmdir()
    assert await waiting
    async with LocalRegistry("mine", tmp_path).locked(timeout_s=0) as is_held:
        assert not is_held
