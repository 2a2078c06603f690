"""Downloads from several members: what they send wrongly, when they leave, and what an interruption leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from swarm_models.sharing import download
from swarm_models.sharing.download import PATIENCE_S, Download
from swarm_models.sharing.manifest import Manifest
from swarm_models.sharing.piece_store import PieceStore
from swarm_protocol.errors import CheckpointError
from tests.unit.models.sharing.files import PIECE, manifest_of, small_pieces, write_files
from tests.unit.models.sharing.members import CrowdedMember, DrippingMember, FakeMember, finder, in_thread
from tests.worlds.virtual_time import run_virtually

PIECES = 15  # of all files together


class Scene:
    """A machine without a copy, and the files that members have."""

    def __init__(self, tmp_path: Path) -> None:
        self.source = write_files(tmp_path / "source")
        self.manifest = manifest_of(self.source)
        self.blocked: list[str] = []
        self._cache = tmp_path / "cache"

    def member(self, name: str, **faults: Any) -> FakeMember:
        return FakeMember(name, self.source, self.manifest, **faults)

    def store(self) -> PieceStore:
        store = PieceStore(self.manifest, self._cache)
        store.open()
        return store

    def download(self, *members: FakeMember) -> Download:
        return Download(self.store(), finder(*members), self.blocked.append, in_thread)

    def all(self) -> list[tuple[Any, range]]:
        return [(file, range(len(file.pieces))) for file in self.manifest.files]

    def run(self, scenario: Callable[[], Any]) -> float:
        """How many virtual seconds it took."""

        async def timed() -> float:
            start_s = asyncio.get_running_loop().time()
            await scenario()
            return asyncio.get_running_loop().time() - start_s

        return run_virtually(timed())

    def is_complete(self) -> bool:
        store = self.store()
        return all(store.path(f).read_bytes() == (self.source / f.name).read_bytes() for f in self.manifest.files)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    small_pieces(monkeypatch)
    return Scene(tmp_path)


def manifest_length(manifest: Manifest) -> int:
    return sum(len(file.pieces) for file in manifest.files)


def test_members_send_at_the_same_time(scene: Scene) -> None:
    assert manifest_length(scene.manifest) == PIECES
    alone_s = scene.run(lambda: scene.download(scene.member("a")).fetch(scene.all()))
    assert alone_s == pytest.approx(16.0, abs=0.5)  # two streams, two seconds for a piece
    assert scene.is_complete()


def test_a_faster_member_sends_more_and_each_piece_comes_once(scene: Scene) -> None:
    slow, fast = scene.member("slow", part_s=3.1), scene.member("fast", part_s=0.5)
    took_s = scene.run(lambda: scene.download(slow, fast).fetch(scene.all()))
    assert len(slow.sent) + len(fast.sent) <= PIECES + 1 and len(fast.sent) >= 3 * len(slow.sent) > 0
    assert took_s < 9.5 and scene.is_complete()


def test_only_what_is_wanted_is_fetched(scene: Scene) -> None:
    member, file = scene.member("a"), scene.manifest.files[1]
    download = scene.download(member)
    scene.run(lambda: download.fetch([(file, file.pieces_of(PIECE + 1, 3 * PIECE - 1))]))
    assert member.sent == list(file.pieces[1:3])
    scene.run(lambda: download.fetch([(file, range(1, 4))]))
    assert member.sent == list(file.pieces[1:4])  # what is there is not asked for


def test_a_wrong_byte_is_refused_and_its_sender_blocked(scene: Scene) -> None:
    liar, honest = scene.member("liar", lies=True, part_s=0.1), scene.member("honest")
    download = scene.download(liar, honest)
    scene.run(lambda: download.fetch(scene.all()))
    assert scene.is_complete() and scene.blocked == ["liar"]
    asked = len(liar.sent)
    assert 1 <= asked <= 2  # one on each stream


def test_a_member_that_has_sent_a_wrong_byte_is_asked_for_nothing_else(scene: Scene) -> None:
    class LyingOnce(FakeMember):
        async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
            self.lies = not self.sent
            async for part in super().read(digest):
                yield part

    liar = LyingOnce("liar", scene.source, scene.manifest, part_s=0.1)
    scene.run(lambda: scene.download(liar, scene.member("honest")).fetch(scene.all()))
    assert scene.is_complete() and scene.blocked == ["liar"]
    assert len(liar.sent) <= 2  # one on each stream


def test_members_leave_and_others_come(scene: Scene) -> None:
    leaving, late = scene.member("leaving", fails_after=3), scene.member("late")
    late.is_there = False

    async def scenario() -> None:
        fetching = asyncio.ensure_future(scene.download(leaving, late).fetch(scene.all()))
        await asyncio.sleep(PATIENCE_S / 2)
        late.is_there = True
        await fetching

    scene.run(scenario)
    assert scene.is_complete() and len(late.sent) == PIECES - 3


def test_after_its_first_failure_a_member_is_left_alone_for_1_s_and_after_its_second_for_2_s(scene: Scene) -> None:
    class Failing(FakeMember):
        async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
            asked_s.append(asyncio.get_running_loop().time())
            self.fails_after = 0 if len(asked_s) <= 3 else None
            async for part in super().read(digest):
                yield part

    asked_s: list[float] = []
    member, file = Failing("a", scene.source, scene.manifest), scene.manifest.files[1]
    scene.run(lambda: scene.download(member).fetch([(file, range(1))]))
    assert [at_s - asked_s[0] for at_s in asked_s] == pytest.approx([0.0, 0.0, 1.0, 2.0])  # it has two streams


def test_members_with_some_of_the_pieces_add_up(scene: Scene) -> None:
    low, high = scene.member("low", has=range(6)), scene.member("high", has=range(5, 11))
    scene.run(lambda: scene.download(low, high).fetch(scene.all()))
    assert scene.is_complete()


def test_a_member_that_hangs_is_not_waited_for(scene: Scene) -> None:
    hanging, other = scene.member("hanging", hangs=True), scene.member("other")
    took_s = scene.run(lambda: scene.download(hanging, other).fetch(scene.all()))
    assert scene.is_complete() and took_s < 25.0


def test_without_members_it_says_what_is_missing(scene: Scene) -> None:
    member = scene.member("a", has=range(4))
    with pytest.raises(CheckpointError, match=r"no member of the swarm gives piece 4 of model-1.safetensors of owner"):
        scene.run(lambda: scene.download(member).fetch(scene.all()))
    assert len(scene.store().held(scene.manifest.files[1])) == 4  # kept for the next start


@pytest.mark.parametrize("interrupted_s", [(3.0, 5.0), (0.5, 9.0)])
def test_an_interrupted_download_goes_on_where_it_was(scene: Scene, interrupted_s: tuple[float, float]) -> None:
    members = [scene.member("a"), scene.member("b")]

    async def interrupted(after_s: float) -> None:
        fetching = asyncio.ensure_future(scene.download(*members).fetch(scene.all()))
        await asyncio.sleep(after_s)
        fetching.cancel()
        await asyncio.wait([fetching])

    for after_s in interrupted_s:
        scene.run(lambda after_s=after_s: interrupted(after_s))
    scene.run(lambda: scene.download(*members).fetch(scene.all()))
    asked = [digest for member in members for digest in member.sent]
    assert scene.is_complete()
    assert set(asked) == {digest for file in scene.manifest.files for digest in file.pieces}
    assert len(asked) <= PIECES + 2 * 4  # again only what was under way: two pieces of each member


def dripping(scene: Scene, name: str, only: list[bytes] | None = None) -> DrippingMember:
    return DrippingMember(name, scene.source, scene.manifest, only=only)


def test_a_member_that_comes_is_asked_while_another_drips(scene: Scene) -> None:
    drip, late = dripping(scene, "drip"), scene.member("late")
    late.is_there = False
    took_s = scene.run(lambda: coming(scene, drip, late, 30.0))
    assert scene.is_complete() and took_s < 30.0 + 30.0 + 16.0


async def coming(scene: Scene, there: FakeMember, late: FakeMember, after_s: float) -> None:
    fetching = asyncio.ensure_future(scene.download(there, late).fetch(scene.all()))
    await asyncio.sleep(after_s)
    late.is_there = True
    await fetching


def test_members_that_drip_make_room_for_others(scene: Scene) -> None:
    members = [*(dripping(scene, str(index)) for index in range(8)), scene.member("good")]
    assert scene.run(lambda: scene.download(*members).fetch(scene.all())) < 120.0
    assert scene.is_complete()


def test_a_fast_member_that_comes_helps_a_slow_one(scene: Scene) -> None:
    slow, fast = scene.member("slow", part_s=4.5), scene.member("fast", part_s=0.1)
    fast.is_there = False
    took_s = scene.run(lambda: coming(scene, slow, fast, 5.0))
    assert scene.is_complete() and took_s < 40.0 and len(fast.sent) > len(slow.sent)


def test_two_members_together_do_not_stall_a_piece(scene: Scene) -> None:
    first = dripping(scene, "first")
    second, good = dripping(scene, "second", only=first.sent), scene.member("good", part_s=2.0)
    took_s = scene.run(lambda: scene.download(first, second, good).fetch(scene.all()))
    assert scene.is_complete() and took_s < 60.0


def test_members_that_only_drip_are_given_up(scene: Scene) -> None:
    with pytest.raises(CheckpointError, match="no member of the swarm gives piece"):
        scene.run(lambda: scene.download(dripping(scene, "drip")).fetch(scene.all()))


def test_a_busy_member_is_waited_for(scene: Scene) -> None:
    busy = CrowdedMember("busy", scene.source, scene.manifest)
    busy.free_s = 10 * PATIENCE_S
    took_s = scene.run(lambda: scene.download(busy).fetch(scene.all()))
    assert scene.is_complete() and took_s < busy.free_s + 60.0


def test_busy_members_make_room_for_others(scene: Scene) -> None:
    busy = [CrowdedMember(str(index), scene.source, scene.manifest) for index in range(8)]
    for member in busy:
        member.free_s = inf
    took_s = scene.run(lambda: scene.download(*busy, scene.member("good")).fetch(scene.all()))
    assert scene.is_complete() and took_s < 30.0


def test_a_member_that_is_always_busy_is_given_up(scene: Scene) -> None:
    busy = CrowdedMember("busy", scene.source, scene.manifest)
    busy.free_s = inf
    with pytest.raises(CheckpointError, match="no member of the swarm gives piece"):
        scene.run(lambda: scene.download(busy).fetch(scene.all()))


def test_a_slow_line_is_not_divided_among_too_many(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """All members together send eight bytes a second to this machine: enough for two pieces at a time."""
    monkeypatch.setattr(download, "LEAST_BYTES_PER_S", 4)
    line = asyncio.Lock()

    class Far(FakeMember):
        async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
            for byte in self._content[digest]:
                async with line:
                    await asyncio.sleep(1 / 8)
                yield bytes([byte])

    members = [Far(str(index), scene.source, scene.manifest) for index in range(8)]
    took_s = scene.run(lambda: scene.download(*members).fetch(scene.all()))
    assert scene.is_complete() and took_s < 2 * sum(file.size_bytes for file in scene.manifest.files) / 8


def test_nobody_sends_a_piece_again_that_is_being_written(scene: Scene) -> None:
    """The last piece of a file is written when all of the file has been read once more."""
    member = scene.member("a", part_s=0.1)

    async def slowly(function: Any, *args: Any) -> Any:
        if function.__name__ == "write":
            await asyncio.sleep(2 * PATIENCE_S)
        return function(*args)

    other = scene.member("b", part_s=0.1)
    fetching = Download(scene.store(), finder(member, other), in_thread=slowly)
    scene.run(lambda: fetching.fetch(scene.all()))
    assert scene.is_complete() and len(member.sent) + len(other.sent) == PIECES
