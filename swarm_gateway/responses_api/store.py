"""The responses that later requests may go on from, in SQLite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.database import Database, owner_of

MOST_BYTES = 64 * 2**20  # of all conversations that are stored
_APPLICATION_ID = 0x53775273  # says in the file's header whose it is
_PREVIOUS = "previous_response_id"
_MOST_PREVIOUS = 1000  # responses that one may follow, one after the other
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, key TEXT, previous TEXT, size INTEGER, items TEXT, response TEXT
)"""
# Responses stay in the order of what they and the later ones of their key take: who has most loses the oldest first.
_LEAVE_OUT = """DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, SUM(size) OVER (ORDER BY of_key, number DESC) AS total FROM (
            SELECT number, size, SUM(size) OVER (PARTITION BY key ORDER BY number DESC) AS of_key FROM responses
        )
    ) WHERE total > ?
)"""


class ResponseStore:
    """The latest responses, with the items of their requests. A key sees its own responses only.

    Once there are more than ``most_bytes``, the oldest responses of the keys that have the most are left out. All
    methods may be called by any thread.
    """

    def __init__(self, path: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """Open the file, or keep everything in memory without one. Raise ValueError if the file cannot be used."""
        self._most_bytes = most_bytes
        self._database = Database(path, _APPLICATION_ID, [_TABLE], "responses")

    def add(self, key: str, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Store a response, and the items of its request."""
        texts = json.dumps(items), json.dumps(response)
        row = (response["id"], owner_of(key), response["previous_response_id"], sum(map(len, texts)), *texts)
        self._database.run("INSERT INTO responses VALUES (NULL, ?, ?, ?, ?, ?, ?)", *row)
        if self._database.one("SELECT SUM(size) FROM responses")[0] > self._most_bytes:
            self._database.run(_LEAVE_OUT, self._most_bytes)

    def get(self, key: str, response_id: str) -> dict[str, Any]:
        """Return a response. Raise ApiError if there is none of this key."""
        response: dict[str, Any] = json.loads(self._row(key, response_id)[2])
        return response

    def items(self, key: str, response_id: str) -> list[dict[str, Any]]:
        """Return the items of a request. Raise ApiError if there is no such response of this key."""
        items: list[dict[str, Any]] = json.loads(self._row(key, response_id)[1])
        return items

    def conversation(self, key: str, response_id: str) -> tuple[list[dict[str, Any]], int]:
        """Return all items up to the end of a response, and the number of bytes that they take as JSON.

        Raise ApiError if a response before it is not stored any more.
        """
        parts: list[list[dict[str, Any]]] = []
        num_bytes = 0
        earlier: str | None = response_id
        while earlier is not None:
            if len(parts) == _MOST_PREVIOUS:
                raise ApiError(400, f"expected at most {_MOST_PREVIOUS} previous responses", param=_PREVIOUS)
            earlier, items, response = self._row(key, earlier, param=_PREVIOUS)
            output = json.loads(response)["output"]  # the rest, such as its tools, is no part of the conversation
            num_bytes += len(items) + len(json.dumps(output))
            parts.append([*json.loads(items), *output])
        return [item for part in reversed(parts) for item in part], num_bytes

    def delete(self, key: str, response_id: str) -> None:
        """Forget a response. Raise ApiError if there is none of this key."""
        self._row(key, response_id)
        self._database.run("DELETE FROM responses WHERE id = ?", response_id)

    def close(self) -> None:
        self._database.close()

    def _row(self, key: str, response_id: str, param: str = "response_id") -> tuple[str | None, str, str]:
        where = "FROM responses WHERE id = ? AND key = ?"
        row = self._database.one(f"SELECT previous, items, response {where}", response_id, owner_of(key))
        if row is None:
            raise ApiError(404, "there is no such response: it was not stored, or is too old", param=param)
        return row[0], row[1], row[2]
