"""An observer of a run: the share of time computing as counted by hand, and the events between two views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_training.contract.views import BanView, PeerView, RunView
from swarm_training.reports.observing import RunObserver, changes

TARGET = 100
FOUND = RunView(
    "run", 0, None, 0, TARGET, None, 0, 0, (PeerView("QmFast", "", 0, 15.0), PeerView("QmSlow", "", 0, 5.0))
)


def observer() -> RunObserver:
    return RunObserver(lambda step: 10.0**-step, checkpoint_every=2)


def test_the_share_of_time_computing_is_that_of_whole_steps() -> None:
    """Together the peers need 5 s for a batch. Steps take 8 s: the peers compute in 5 of these, and average in 3."""
    observed = observer()
    seen = [observed.complete(replace(FOUND, step=int(at // 8)), float(at)) for at in range(3, 41)]
    assert [view.computing for view in seen[:13]] == [None] * 13
    assert all(view.computing == pytest.approx(5 / 8) for view in seen[13:])
    assert [view.learning_rate for view in seen[::8]] == [1.0, 1.0, 0.1, 0.01, 0.001]
    assert [view.checkpoint for view in seen[::8]] == [None, None, 2, 2, 4]


def test_after_a_rollback_the_share_is_measured_anew() -> None:
    observed = observer()
    for step in range(3):
        view = observed.complete(replace(FOUND, step=step), 10.0 * step)
    assert view.computing == pytest.approx(0.5)
    assert observed.complete(replace(FOUND, step=1, rollbacks=1), 25.0).computing is None


def test_events_are_what_differs_between_two_views() -> None:
    ban = BanView("QmSlow", 100.0, "noise")
    new = (FOUND.peers[0], PeerView("QmNewest", "", 0, 1.0))
    after = replace(FOUND, step=4, checkpoint=4, peers=new, bans=(ban,))
    assert list(changes(FOUND, after)) == ["…Newest joined", "…QmSlow was banned", "checkpoint of step 4"]
    assert list(changes(after, replace(after, step=2, checkpoint=2, rollbacks=1, peers=new[1:]))) == [
        "…QmFast left",
        "the run went back to step 2",
    ]
    observed = observer()
    observed.complete(FOUND, 5.0)
    (event,) = observed.complete(replace(FOUND, peers=FOUND.peers[1:]), 6.0).events
    assert (event.at, event.text) == (6.0, "…QmFast left")
