"""What servers say of how far they are: what counts as getting on, and which queues are taken for."""

from __future__ import annotations

from swarm_client.swarm.progress_tracker import ProgressTracker
from swarm_client.swarm.watchdog import StallAlarms
from swarm_protocol.pb import swarm_pb2 as pb
from tests.unit.support import server_record


def test_a_counter_that_rises_between_two_probes_is_progress() -> None:
    tracker = ProgressTracker()
    tracker.probed("ada", pb.SessionProgress(computed=100), 1.0)
    assert tracker.grew_s("ada") < 0  # it may have stood there for a long time
    tracker.probed("ada", pb.SessionProgress(computed=100), 2.0)
    assert tracker.grew_s("ada") < 0
    tracker.probed("ada", pb.SessionProgress(computed=101), 3.0)
    tracker.probed("ada", pb.SessionProgress(computed=90), 4.0)  # it has begun anew
    assert tracker.grew_s("ada") == 3.0
    tracker.probed("ada", pb.SessionProgress(computed=91), 5.0)
    tracker.probed("ada", pb.SessionProgress(computed=99), 1000.0)  # nobody knows when
    assert tracker.grew_s("ada") == 5.0
    assert tracker.grew_s("bob") < 0


def test_a_queue_that_a_server_has_just_told_of_is_taken_instead_of_its_record() -> None:
    tracker, record = ProgressTracker(), server_record("ada", queue_delay_s=7.0)
    assert tracker.refreshed(record, 0.0) is record
    tracker.waits("ada", None, 1.0)  # it says nothing
    assert tracker.refreshed(record, 1.0) is record
    tracker.waits("ada", 0.5, 2.0)
    tracker.waits("bob", 9.0, 2.0)
    assert tracker.refreshed(record, 4.0).queue_delay_s == 0.5
    for wrong in (float("nan"), float("inf"), -1.0):
        tracker.waits("ada", wrong, 3.0)
    assert tracker.refreshed(record, 4.0).queue_delay_s == 0.5
    assert tracker.refreshed(record, 60.0) is record
    tracker.forget("ada")
    assert tracker.refreshed(record, 4.0) is record


def test_alarms_about_other_servers_count_for_a_while() -> None:
    alarms = StallAlarms()
    for peer_id, now_s in (("ada", 0.0), ("ada", 1.0), ("bob", 20.0)):
        alarms.add(peer_id, now_s)
    assert (alarms.num_others("ada", 20.0), alarms.num_others("bob", 20.0), alarms.num_others("eve", 20.0)) == (1, 1, 2)
    assert (alarms.num_others("ada", 40.0), alarms.num_others("bob", 40.0)) == (1, 0)
