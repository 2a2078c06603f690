"""The sessions of one client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any


class OpenSessions:
    """The open sessions, held weakly. Any thread may add one, even while another thread iterates over them."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changing = threading.Lock()

    def add(self, session: Any) -> None:
        with self._changing:
            self._sessions.add(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the sessions that exist now."""
        with self._changing:
            return iter(list(self._sessions))
