"""The last checkpoints are there, in memory or in files, and nothing is left of the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import pytest

from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.config import RollbackPolicy, TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Lineage
from swarm_training.rollback.kept import KeptCheckpoints, file_name, stored_in


def digest(step: int) -> bytes:
    return bytes([step]) * 32


def content(kept: KeptCheckpoints, digest: bytes) -> bytes:
    state = kept.read(digest)
    assert state is not None
    return b"".join(state.parts())


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_newest_are_kept_until_they_are_undone(on_disk: bool, tmp_path: Path) -> None:
    kept = KeptCheckpoints(5, 2, tmp_path / "new" if on_disk else None)
    for step in (0, 5, 10):
        assert kept.is_due(step) and not kept.is_due(step + 1)
        kept.keep(step, digest(step), StateFile.of(b"state %d" % step))
    assert kept.digests() == {5: digest(5), 10: digest(10)}
    assert content(kept, digest(5)) == b"state 5" and kept.read(digest(0)) is None
    kept.keep(10, digest(11), StateFile.of(b"another"))
    assert kept.read(digest(10)) is None and content(kept, digest(11)) == b"another"
    kept.discard_after(5)
    assert kept.digests() == {5: digest(5)}
    assert len(list(tmp_path.rglob("*.safetensors"))) == on_disk
    kept.close()
    assert kept.digests() == {} and list(tmp_path.rglob("*")) == [tmp_path / "new"] * on_disk


def test_of_what_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"the first half")
        raise OSError("the disk is full")

    kept = KeptCheckpoints(1, 2, tmp_path)
    kept.keep(1, digest(1), StateFile.of(b"state"))
    with pytest.raises(OSError, match="full"):
        kept.keep_written(2, digest(2), write)
    assert kept.digests() == {1: digest(1)} and len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_temporary_directory_that_the_system_has_removed_is_made_again(tmp_path: Path) -> None:
    kept = KeptCheckpoints(1, 2, tmp_path / "temporary")
    kept.keep(1, digest(1), StateFile.of(b"state"))
    shutil.rmtree(tmp_path / "temporary")
    kept.keep(2, digest(2), StateFile.of(b"later"))
    assert content(kept, digest(2)) == b"later" and kept.read(digest(1)) is None


def test_processes_share_a_directory_without_sharing_files(tmp_path: Path) -> None:
    first, second = KeptCheckpoints(1, 1, tmp_path), KeptCheckpoints(1, 1, tmp_path)
    first.keep(1, digest(1), StateFile.of(b"state"))
    second.keep(1, digest(1), StateFile.of(b"state"))
    first.close()
    assert content(second, digest(1)) == b"state"


def sha(data: bytes) -> bytes:
    return sha256(data).digest()


def sha_of(state: StateFile) -> bytes:
    return sha(b"".join(state.parts()))


def lasting(directory: Path, most: int = 2) -> KeptCheckpoints:
    return KeptCheckpoints(1, most, directory, stays=True, digest_of=sha_of)


def test_what_stays_is_whole_at_every_byte_of_writing(tmp_path: Path) -> None:
    kept, data = lasting(tmp_path), b"a new state"

    def write(file: BinaryIO) -> None:
        for byte in data:
            file.write(bytes([byte]))
            file.flush()
            assert [each.step for each in stored_in(tmp_path).values()] == [1]

    kept.keep(1, sha(b"state"), StateFile.of(b"state"))
    kept.keep_written(2, sha(data), write)
    kept.close()
    assert {each.step: path.read_bytes() for path, each in stored_in(tmp_path).items()} == {1: b"state", 2: data}


def test_what_stays_is_taken_over(tmp_path: Path) -> None:
    first = lasting(tmp_path, 3)
    for step in (1, 2, 3):
        first.keep(step, sha(b"%d" % step), StateFile.of(b"%d" % step), Lineage(0, 0, 0))
    first.mark(1, 1, 51)  # the run goes back to step 1, and is killed before it discards what was later
    second = lasting(tmp_path, 3)
    second.adopt(1, sha(b"1"))
    assert second.digests() == {1: sha(b"1")} and second.newest().lineage == Lineage(0, 1, 51)
    assert len(stored_in(tmp_path)) == 1
    second.keep(2, sha(b"2 again"), StateFile.of(b"2 again"), Lineage(1, 1, 51))
    third = lasting(tmp_path, 1)
    third.adopt(2, sha(b"2 again"))
    assert third.digests() == {2: sha(b"2 again")} and len(stored_in(tmp_path)) == 1
    third.keep(3, sha(b"3"), StateFile.of(b"3"))
    assert [each.step for each in stored_in(tmp_path).values()] == [3]


def test_processes_that_share_what_stays_leave_each_others_older_ones(tmp_path: Path) -> None:
    """The second has joined late."""
    first, second = lasting(tmp_path, 3), lasting(tmp_path, 3)
    for step in (1, 2, 3):
        first.keep(step, sha(b"%d" % step), StateFile.of(b"%d" % step))
    second.keep(3, sha(b"3"), StateFile.of(b"3"))
    assert sorted(each.step for each in stored_in(tmp_path).values()) == [1, 2, 3]


def test_what_was_undone_while_nobody_knew_is_not_taken_over(tmp_path: Path) -> None:
    """Step 2 was undone by a rollback to step 1, and the run has come to step 3 since."""
    kept = lasting(tmp_path, 5)
    for step, lineage in ((1, Lineage(0, 1, 51)), (2, Lineage()), (3, Lineage(1, 1, 51))):
        kept.keep(step, sha(b"%d" % step), StateFile.of(b"%d" % step), lineage)
    again = lasting(tmp_path, 5)
    again.adopt(3, sha(b"3"))
    assert again.digests().keys() == {1, 3}


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"stat")])
def test_what_is_damaged_is_not_read(harm: Callable[[Path], object], tmp_path: Path) -> None:
    kept = lasting(tmp_path)
    kept.keep(1, sha(b"state"), StateFile.of(b"state"))
    (path,) = stored_in(tmp_path)
    assert content(kept, sha(b"state")) == b"state"
    path.rename(renamed := path.with_name(path.name.replace(".0.0.0.", ".0.1.2.")))  # by another process
    assert content(kept, sha(b"state")) == b"state"
    kept.mark(1, 1, 3)
    assert content(kept, sha(b"state")) == b"state"
    harm(renamed)
    assert kept.read(sha(b"state")) is None


def test_a_damaged_file_is_read_once_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = lasting(tmp_path)
    kept.keep(1, sha(b"state"), StateFile.of(b"state"))
    (path,) = stored_in(tmp_path)
    path.write_bytes(b"stat")
    assert kept.read(sha(b"state")) is None
    assert caplog.messages == [f"the checkpoint {path} is damaged, and is not used"]


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    kept = KeptCheckpoints(0, 2, tmp_path)
    assert not kept.is_due(0) and list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint_directory is .*file: "):
        KeptCheckpoints(1, 2, tmp_path / "file")
    assert TrainingConfig(checkpoint_every=5, checkpoints_kept=3, rollback=RollbackPolicy(patience=10))


def test_spared_checkpoints_stay_beside_the_newest_and_are_none_to_go_back_to(tmp_path: Path) -> None:
    kept = KeptCheckpoints(2, 2, tmp_path, stays=True)
    kept.spare({5})
    for step in range(2, 11):
        if kept.is_due(step) or step == 5:
            kept.keep_written(step, digest(step), lambda file: file.write(b"x"), is_extra=not kept.is_due(step))
    assert list(kept.digests()) == [8, 10] and kept.newest() == Kept(10, digest(10))
    assert kept.of(5) == Kept(5, digest(5)) and content(kept, digest(5)) == b"x" and kept.of(6) is None
    assert sorted(each.step for each in stored_in(tmp_path).values()) == [5, 8, 10]
    again = KeptCheckpoints(2, 2, tmp_path, stays=True)
    again.spare({5})
    again.adopt(10, digest(10))
    assert list(again.digests()) == [8, 10] and content(again, digest(5)) == b"x"
    joined = KeptCheckpoints(2, 2, tmp_path, stays=True)
    joined.spare({5})
    joined.adopt_spared(Moment(1, 5))  # another state: that of the file has been undone
    assert joined.of(5) is None
    joined.adopt_spared(Moment(0, 5))
    assert joined.of(5) == Kept(5, digest(5)) and not joined.digests()
    joined.keep(5, digest(5), StateFile.of(b"x"))
    assert list(joined.digests()) == [5]
    again.spare(())
    assert sorted(each.step for each in stored_in(tmp_path).values()) == [8, 10]
    (tmp_path / file_name(Kept(7, digest(7)))).write_bytes(b"x")
    KeptCheckpoints(2, 2, tmp_path, stays=True).adopt(10, digest(10))
    assert sorted(each.step for each in stored_in(tmp_path).values()) == [8, 10]
