"""Sessions that are opened while all of them are looked at."""

from __future__ import annotations

import gc

from swarm_client.core.open_sessions import OpenSessions


class Session:
    pass


def test_one_may_be_opened_while_another_thread_looks_at_all() -> None:
    sessions, first = OpenSessions(), Session()
    sessions.add(first)
    later = []
    for each in sessions:
        assert each is first
        later.append(Session())
        sessions.add(later[-1])
    assert set(sessions) == {first, *later} and len(sessions) == 2


def test_one_that_nobody_uses_is_forgotten() -> None:
    sessions = OpenSessions()
    sessions.add(Session())
    gc.collect()
    assert not sessions and list(sessions) == []
