"""A peer gives its state to others: without stalling for a slow disk, and in few files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_training.checkpoints import state_file
from swarm_training.checkpoints.state_file import StateFile, UnreadableState
from swarm_training.core.moment import Moment
from swarm_training.run import state as states
from swarm_training.run.transfer.receiving import compare, download
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import SimulatedPeer, World, simulate
from tests.worlds.virtual_time import at_once

pytestmark = IN_VIRTUAL_TIME

WRITES_S = 60.0


async def slowly(function: Callable[[], Any]) -> Any:
    """Call the function; what writes a state takes a minute."""
    if "snapshot" in repr(function):
        await asyncio.sleep(WRITES_S)
    return function()


async def giver_and_joiner(monkeypatch: pytest.MonkeyPatch, files: list[int]) -> tuple[SimulatedPeer, SimulatedPeer]:
    world = World()
    giver = SimulatedPeer.make(world, 0, target=4, in_thread=slowly)
    await giver.enter()
    joiner = SimulatedPeer.make(world, 1, target=4)
    monkeypatch.setattr(states, "temporary_file", lambda: files.append(1) or state_file.temporary_file())
    return giver, joiner


def test_joiners_wait_for_a_slow_disk_and_share_one_file_and_who_compares_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: list[int] = []

    async def scenario() -> None:
        giver, joiner = await giver_and_joiner(monkeypatch, files)
        network: Any = joiner.peer._network
        await compare(network, giver.peer.own, joiner.state)
        assert not files
        other = SimulatedPeer.make(giver.world, 2, target=4, size=38)
        with pytest.raises(ValueError, match=r"\[38\] float32 here and \[37\] float32 in the run"):
            await other.peer.find_others()
        assert not files
        first, second = await asyncio.gather(
            *(download(network, giver.peer.own, joiner.state, at_once) for _ in range(2))
        )
        assert len(files) == 1
        expected = giver.state.digest()
        for each in (first, second):
            joiner.state.load(each.arrival.moment, each.data)
            assert joiner.state.digest() == expected

    monkeypatch.setattr(
        "swarm_training.run.transfer.receiving._DISK_BYTES_PER_S", 1.0
    )  # the state has some hundred bytes
    simulate(scenario)


def test_a_giver_that_a_step_has_overtaken_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        giver, joiner = await giver_and_joiner(monkeypatch, [])
        await joiner.peer.find_others()
        joiner.peer.start()
        downloading = joiner.spawn(joiner.peer.downloads.newest())
        await asyncio.sleep(WRITES_S / 2)
        await giver.step(states.torch.ones(giver.state.length), samples=4)
        downloaded = await downloading
        assert downloaded is not None and downloaded.arrival.moment == giver.state.moment == Moment(0, 1)

    monkeypatch.setattr("swarm_training.run.transfer.receiving._DISK_BYTES_PER_S", 1.0)
    simulate(scenario)


async def test_who_gets_no_state_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    giver, joiner = await giver_and_joiner(monkeypatch, [])
    await joiner.peer.find_others()
    giver.peer._state_server._arrivals.clear()
    assert await joiner.peer.downloads.newest() is None
    assert f"{giver.peer_id}: the run has gone on" in str(joiner.peer.downloads.no_state())


def test_a_step_is_not_kept_waiting_and_a_state_that_it_overtakes_is_not_given() -> None:
    state = SimulatedPeer.make(World(), 0, target=4).state
    gradient = states.torch.ones(state.length)
    original = states.safetensors_bytes.write

    def overtaken(*arguments: Any) -> None:
        state.apply(gradient)  # would wait for ever if the lock were held
        original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states.safetensors_bytes, "write", overtaken)
        with pytest.raises(PeerUnavailable, match="gone on"):
            state.snapshot(waits=False)
    assert state.snapshot(waits=False)[0] == state.moment == Moment(0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file on a full disk")
def test_a_full_disk_is_a_sentence_and_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimulatedPeer.make(World(), 0, target=4).state
    monkeypatch.setattr(states, "temporary_file", lambda: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    for waits in (True, False):
        with pytest.raises(SwarmError, match="set TMPDIR to a directory with room"):
            state.snapshot(waits)


def damaged(state: StateFile, path: Path) -> StateFile:
    """Return the state in a file that loses its last byte once its header has been read."""
    path.write_bytes(b"".join(state.parts()))
    data = StateFile.open(path)
    header = data.header()

    def then_damaged() -> Any:
        path.open("r+b").truncate(state.size_bytes - 1)
        return header

    data.header = then_damaged  # type: ignore[method-assign]
    return data


def test_a_state_that_can_no_longer_be_read_leaves_the_moment_as_it_was(tmp_path: Path) -> None:
    state = SimulatedPeer.make(World(), 0, target=4).state
    with pytest.raises(UnreadableState, match="it has become shorter"):
        state.load(Moment(0, 7), damaged(state.snapshot()[1], tmp_path / "state"))
    assert state.moment == Moment(0, 0)


async def test_a_peer_does_not_go_on_with_a_state_that_it_has_taken_over_in_part(tmp_path: Path) -> None:
    world = World()
    giver = SimulatedPeer.make(world, 0, target=4)
    giver.state.apply(states.torch.ones(giver.state.length))  # Adam has a state then, which is read last
    await giver.enter()
    joiner = SimulatedPeer.make(world, 1, target=4)
    await joiner.peer.find_others()
    joiner.peer.start()
    download = joiner.peer.downloads.newest

    async def download_damaged() -> Any:
        downloaded = await download()
        assert downloaded is not None
        return replace(downloaded, data=damaged(downloaded.data, tmp_path / "state"))

    joiner.peer.downloads.newest = download_damaged  # type: ignore[method-assign]
    with pytest.raises(UnreadableState, match="it has become shorter"):
        await joiner.drive(joiner.share.load())
    assert joiner.parameter[0] == giver.parameter[0] and joiner.state.digest() != giver.state.digest()  # a mixture
    assert not joiner.peer.own.state_digest


def test_temporary_files_are_where_the_user_wants_them_however_long_the_path_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / ("long" * 20)
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    with state_file.temporary_file() as file:
        link = Path(f"/proc/self/fd/{file.fileno()}")
        assert not link.exists() or str(directory) in str(link.readlink())
