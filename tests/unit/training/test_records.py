"""Records of progress: believed only of who has signed them, and only while they are news."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from swarm_training.core.moment import Moment
from swarm_training.core.record import LEFT, MEETING, TRAINING, Kept, Lineage, OfferedCheckpoint, Progress
from swarm_training.core.signing import read_signed, sign
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.table import ProgressTable
from tests.worlds.identities import identity


def record(number: int = 1, **changes: object) -> Progress:
    own = Progress("toy", identity(number).peer_id, version=1, address="host:1", target_batch_size=9, model=b"m")
    return replace(own, **changes)


def signed(number: int = 1, **changes: object) -> pb.SignedProgress:
    return sign(record(number, **changes), identity(number))


def table(silence_s: float = 4.0, **options: float) -> ProgressTable:
    return ProgressTable("toy", b"m", identity(0).peer_id, silence_s, **options)


def test_a_record_survives_the_wire() -> None:
    sent = record(step=3, samples=7, samples_per_s=1.5, call_s=0.25, share=2.0, state_digest=b"1", state=MEETING)
    sent = replace(sent, excludes=("Qma", "Qmb"), squared_norm=(2.0, -1e-17), global_squared_norm=inf)
    sent, kept = replace(sent, skipped_batches=3), Kept(4, b"k", Lineage(1, 2, 3))
    sent = replace(sent, kept=kept, offers=(OfferedCheckpoint(5, kept), OfferedCheckpoint(6, Kept(7, b"o"))))
    read = read_signed(pb.SignedProgress.FromString(sign(sent, identity(1)).SerializeToString()))
    assert read == sent and read.kept is not None
    assert read.kept.lineage == read.offers[0].kept.lineage == kept.lineage


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.MergeFrom(pb.SignedProgress(progress=sign(record(2), identity(2)).progress)),
        lambda message: message.MergeFrom(pb.SignedProgress(signature=b"AAAA")),
        lambda message: message.MergeFrom(pb.SignedProgress(progress=b"\xff")),
        lambda message: message.MergeFrom(pb.SignedProgress(public_key=b"ssh-rsa AAAA")),
        lambda message: message.MergeFrom(pb.SignedProgress(public_key=b" " * 5000)),
    ],
)
def test_what_another_has_signed_or_nobody_is_refused(change: object) -> None:
    message = signed()
    change(message)
    with pytest.raises(ValueError):
        read_signed(message)
    with pytest.raises(ValueError):
        table().add(message, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_per_s": float("nan")},
        {"share": -1.0},
        {"offers": (OfferedCheckpoint(0, Kept(1 << 63, b"k")),)},
        {"address": "a\n"},
        {"run": "x" * 600},
        {"step": 1 << 63},
        {"target_batch_size": 0},
        {"loss": float("nan")},
        {"loss": float("-inf")},
        {"loss_samples": 1 << 63},
        {"squared_norm": (float("nan"),)},
        {"squared_norm": (1e-9, -1.0)},
        {"squared_norm": (float("inf"), 1.0)},
        {"squared_norm": (1e302,)},
        {"squared_norm": (1.0,) * 65},
        {"global_squared_norm": float("nan")},
        {"global_squared_norm": -1.0},
        {"excludes": ("",)},
        {"excludes": ("a\n",)},
        {"excludes": ("a" * 65,)},
        {"excludes": tuple(f"a{number}" for number in range(17))},
    ],
)
def test_impossible_values_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        read_signed(signed(**changes))


def test_a_peer_speaks_only_for_itself() -> None:
    forged = sign(replace(record(), peer_id=identity(2).peer_id), identity(1))
    with pytest.raises(ValueError, match="not signed by the peer"):
        read_signed(forged)


@pytest.mark.parametrize("changes", [{"run": "other"}, {"model": b"other"}])
def test_other_runs_and_models_are_not_taken_in(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="trains"):
        table().add(signed(**changes), 0.0)


def test_only_newer_records_count() -> None:
    known = table()
    assert known.add(signed(version=5, samples=1), 0.0) and known.add(signed(version=4, samples=2), 0.0) is None
    assert read_signed(known.signed_of(identity(1).peer_id)).samples == 1
    assert known.add(signed(version=6, samples=3), 0.0) and known.counter == 2
    assert len(known.since(0, "nobody")) == 1 and known.since(0, identity(1).peer_id) == [] == known.since(2, "nobody")


def test_the_states_of_past_steps_are_known_however_often_a_peer_reports() -> None:
    known = table()
    for version in range(1, 101):
        known.add(signed(version=version, step=7 + version // 60, state_digest=bytes([version // 60])), 0.0)
    assert known.majority_digest(Moment(0, 7)) == b"\0" and known.majority_digest(Moment(0, 8)) == b"\1"
    assert known.majority_digest(Moment(0, 6)) is None


def test_who_is_silent_is_not_waited_for_and_counts_again_when_heard_of() -> None:
    known, own, peer_id = table(), record(0), identity(1).peer_id
    known.add(signed(version=5), 10.0)
    assert [peer.peer_id for peer in known.view(own, 14.0).others] == [peer_id]
    late = known.view(own, 14.1)
    assert late.others == () and [peer.peer_id for peer in late.silent] == [peer_id] and not late.gone
    known.add(signed(version=6), 20.0)
    assert known.view(own, 20.0).others
    known.suspect(peer_id)
    assert not known.view(own, 20.0).others
    known.add(signed(version=7), 21.0)
    assert known.view(own, 21.0).others


def test_a_silent_peer_is_listed_and_remembered_for_longer_if_silence_begins_late() -> None:
    known, own, peer_id = table(silence_s=500.0), record(0), identity(1).peer_id
    known.add(signed(), 0.0)
    late = known.view(own, 600.0)
    assert late.others == () and [peer.peer_id for peer in late.silent] == [peer_id]
    known.add(signed(2), 1000.0)
    assert known.signed_of(peer_id) is not None
    known.add(signed(2, version=9), 2100.0)
    assert known.signed_of(peer_id) is None


def test_who_has_left_or_ended_is_gone() -> None:
    known, own, peer_id = table(), record(0), identity(1).peer_id
    known.add(signed(version=5), 0.0)
    known.note_gone(peer_id)
    assert known.view(own, 0.0).gone == {peer_id} and known.known() == []
    known.add(signed(version=6), 0.0)
    assert known.view(own, 0.0).gone == set() and len(known.known()) == 1
    known.add(signed(version=7, state=LEFT), 0.0)
    assert known.view(own, 0.0).gone == {peer_id} and known.view(own, 0.0).others == ()


def test_nothing_is_kept_of_who_is_forgotten() -> None:
    known, peer_id = table(), identity(1).peer_id
    known.add(signed(), 0.0)
    known.suspect(peer_id)
    known.note_gone(peer_id)
    known.add(signed(2), 1000.0)
    assert known.signed_of(peer_id) is None and not known._suspects and not known._gone


def test_silence_is_no_end_unless_that_is_wanted() -> None:
    own = record(0)
    strict, lenient = table(), table(presume_gone_s=30.0)
    for known in (strict, lenient):
        known.add(signed(version=5, state=TRAINING), 0.0)
    assert not strict.view(own, 1e6).gone and lenient.view(own, 31.0).gone and not lenient.view(own, 29.0).gone


def test_the_largest_record_is_small_enough_to_be_read() -> None:
    most = record(excludes=tuple("Q" * 44 + f"{number:02}" for number in range(16)), micro_batches=bytes(512))
    most = replace(most, run="x" * 200, target_batch_size=4096, state_digest=bytes(32), result_digest=bytes(32))
    most = replace(most, accepted=bytes(32), decided=bytes(32), tls_fingerprint=bytes(32))
    most = replace(most, squared_norm=(1.0,) * 64, global_squared_norm=64.0)
    assert read_signed(sign(most, identity(1))) == most
