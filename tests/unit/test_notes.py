"""Notes by which peers of one machine find each other: only of the living, and each swarm's apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swarm_protocol.notes import Notes, checked_name


def address(peer_id: str) -> str:
    return f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_is_written_is_read(tmp_path: Path) -> None:
    notes = Notes("mine", tmp_path)
    assert notes.read() == []
    notes.write("peer1", address("peer1"))
    notes.write("peer2", address("peer2"))
    assert Notes("mine", tmp_path).read() == [address("peer1"), address("peer2")]


def test_a_later_note_of_a_server_replaces_its_earlier_one(tmp_path: Path) -> None:
    notes = Notes("mine", tmp_path)
    notes.write("peer", "/old/p2p/peer")
    notes.write("peer", "/new/p2p/peer")
    assert notes.read() == ["/new/p2p/peer"]


def test_a_note_whose_process_is_gone_is_deleted(tmp_path: Path, dead_pid: int) -> None:
    notes = Notes("mine", tmp_path)
    notes.write("alive", address("alive"))
    notes.write("dead", address("dead"))
    (note,) = tmp_path.rglob("dead*")
    note.write_text(note.read_text().replace(str(os.getpid()), str(dead_pid)))
    assert notes.read() == [address("alive")]
    assert not note.exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"pid": 1}', '{"address": "a", "pid": "x"}', json.dumps({"address": "a", "pid": 10**30})],
)
def test_a_damaged_note_is_deleted(content: str, tmp_path: Path) -> None:
    notes = Notes("mine", tmp_path)
    notes.write("good", address("good"))
    notes.write("damaged", address("damaged"))
    (note,) = tmp_path.rglob("damaged*")
    note.write_text(content)
    assert notes.read() == [address("good")]
    assert not note.exists()


def test_a_note_can_be_removed_by_peer_or_by_address(tmp_path: Path) -> None:
    notes = Notes("mine", tmp_path)
    for peer in ("peer1", "peer2", "peer3"):
        notes.write(peer, address(peer))
    notes.remove("peer1")
    notes.discard(address("peer2"))
    notes.remove("never-noted")
    assert notes.read() == [address("peer3")]


def test_swarms_are_apart(tmp_path: Path) -> None:
    one, two = Notes("one", tmp_path), Notes("two", tmp_path)
    one.write("peer1", address("peer1"))
    two.write("peer2", address("peer2"))
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
        Notes(name, tmp_path)


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    waiting, inside = threading.Event(), threading.Event()

    def second() -> None:
        waiting.set()
        with Notes("mine", tmp_path).locked():
            inside.set()

    thread = threading.Thread(target=second, daemon=True)
    with Notes("mine", tmp_path).locked():
        thread.start()
        waiting.wait()
        assert not inside.wait(0.2)  # if the lock did not hold, it would be in at once
    assert inside.wait(30)
    thread.join()


def test_the_lock_of_one_swarm_does_not_hold_up_another(tmp_path: Path) -> None:
    with Notes("one", tmp_path).locked(), Notes("two", tmp_path).locked():
        pass


def test_a_failure_under_the_lock_releases_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Notes("mine", tmp_path).locked():
        1 / 0  # noqa: B018
    with Notes("mine", tmp_path).locked():
        pass
