"""Files, batches and the answers to their requests, in SQLite. A key sees its own only."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.database import Database, owner_of
from swarm_protocol.file_lock import try_lock

MOST_BYTES = 2**30  # of all files and answers
_APPLICATION_ID = 0x53776261  # says in the file's header whose it is
_TABLES = (
    """CREATE TABLE IF NOT EXISTS files (
        number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, entry TEXT, content BLOB
    )""",
    """CREATE TABLE IF NOT EXISTS batches (
        number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, is_over INTEGER, entry TEXT
    )""",
    # One row for each request that has its answer.
    """CREATE TABLE IF NOT EXISTS answers (
        batch TEXT, line INTEGER, succeeded INTEGER, text TEXT, PRIMARY KEY (batch, line)
    )""",
)
_SIZE = """SELECT (SELECT COALESCE(SUM(LENGTH(content)), 0) FROM files) + (SELECT COALESCE(SUM(LENGTH(text)), 0)
    FROM answers)"""

# The entries of batches, each with the number of its answers, and that of the successful ones.
_COUNTED = """SELECT entry, COUNT(line), COALESCE(SUM(succeeded), 0) FROM batches LEFT JOIN answers ON batch = id
    WHERE {} GROUP BY number ORDER BY number DESC"""


@dataclass(frozen=True)
class StoredBatch:
    """A batch that is not over.

    Attributes:
        owner: the name of its key.
    """

    id: str
    owner: str
    entry: dict[str, Any]


class BatchStore:
    """The files and batches of all keys. All methods may be called by any thread.

    Attributes:
        is_shared: whether other processes of this gateway write to the file.
    """

    def __init__(self, path: Path | None, most_bytes: int = MOST_BYTES, *, locks: bool = True) -> None:
        """Open the file; None keeps all in memory. No file is taken once files and answers have ``most_bytes``.

        ``locks``: keep other gateways away from the file; False if the parent of this process does so.

        Raises:
            ValueError: the file cannot be used, or another process uses it, which would answer the same batches.
        """
        self.is_shared = not locks
        self._most_bytes = most_bytes
        self._database = Database(path, _APPLICATION_ID, _TABLES, "batches")
        self._locked = path.open("rb") if locks and path is not None else None
        if self._locked is not None and not try_lock(self._locked):
            self.close()
            raise ValueError(f"{path} is in use: another gateway answers its batches")

    def close(self) -> None:
        self._database.close()
        if self._locked is not None:
            self._locked.close()

    # ------------------------------------------------------------ files

    def add_file(self, key: str, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Store a file; return its entry. Raise ApiError if there is no room."""
        if self._database.one(_SIZE)[0] + len(content) > self._most_bytes:
            message = f"files and answers of all batches have {self._most_bytes} bytes at most: delete some"
            raise ApiError(400, message, param="file", code="storage_full")
        return self._insert(owner_of(key), name, purpose, content)

    def _insert(self, owner: str, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        entry = {
            "id": f"file-{uuid.uuid4().hex}",
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self._database.run(
            "INSERT INTO files VALUES (NULL, ?, ?, ?, ?)", entry["id"], owner, json.dumps(entry), content
        )
        return entry

    def files(self, key: str, purpose: str | None = None) -> list[dict[str, Any]]:
        """Return the entries of the key's files, newest first."""
        rows = self._database.all("SELECT entry FROM files WHERE owner = ? ORDER BY number DESC", owner_of(key))
        entries = [json.loads(entry) for (entry,) in rows]
        return [entry for entry in entries if purpose in (None, entry["purpose"])]

    def file(self, key: str, file_id: str) -> dict[str, Any]:
        """Return the entry of a file. Raise ApiError if the key has no such file."""
        entry: dict[str, Any] = json.loads(self._file(owner_of(key), file_id, "entry"))
        return entry

    def content(self, owner: str, file_id: str) -> bytes:
        """Return what is in a file. Raise ApiError if there is no such file of this owner."""
        return bytes(self._file(owner, file_id, "content"))

    def delete_file(self, key: str, file_id: str) -> None:
        """Delete a file. Raise ApiError if the key has no such file, or a batch still needs it."""
        self._file(owner_of(key), file_id, "id")
        if any(batch.entry["input_file_id"] == file_id for batch in self.unfinished()):
            raise ApiError(409, f"a batch still reads {file_id}: cancel the batch first", param="file_id")
        self._database.run("DELETE FROM files WHERE id = ?", file_id)

    def _file(self, owner: str, file_id: str, column: str) -> Any:
        row = self._database.one(f"SELECT {column} FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if row is None:
            raise ApiError(404, f"there is no file {file_id!r}", param="file_id")
        return row[0]

    # ------------------------------------------------------------ batches

    def add_batch(self, key: str, entry: Mapping[str, Any]) -> None:
        is_over = entry["status"] == "failed"
        values = entry["id"], owner_of(key), is_over, json.dumps(entry)
        self._database.run("INSERT INTO batches VALUES (NULL, ?, ?, ?, ?)", *values)

    def batch(self, key: str, batch_id: str) -> dict[str, Any]:
        """Return a batch. Raise ApiError if the key has no such batch."""
        row = self._database.one(_COUNTED.format("id = ? AND owner = ?"), batch_id, owner_of(key))
        if row is None:
            raise ApiError(404, f"there is no batch {batch_id!r}", param="batch_id")
        return _counted(*row)

    def batches(self, key: str) -> list[dict[str, Any]]:
        """Return the key's batches, newest first."""
        return [_counted(*row) for row in self._database.all(_COUNTED.format("owner = ?"), owner_of(key))]

    def unfinished(self) -> list[StoredBatch]:
        """Return the batches that are not over, oldest first."""
        rows = self._database.all("SELECT id, owner, entry FROM batches WHERE NOT is_over ORDER BY number")
        return [StoredBatch(batch_id, owner, json.loads(entry)) for batch_id, owner, entry in rows]

    def change(self, batch_id: str, fields: Mapping[str, Any], *, only_if: str = "") -> None:
        """Change fields of a batch that is not over; ``only_if`` it has this status, unless that is empty."""
        with self._database.transaction():
            self._change(batch_id, fields, only_if=only_if)

    def _change(self, batch_id: str, fields: Mapping[str, Any], *, only_if: str = "", is_over: bool = False) -> None:
        row = self._database.one(_COUNTED.format("id = ? AND NOT is_over"), batch_id)
        if row is None:
            return
        entry = _counted(*row)
        if only_if in ("", entry["status"]):
            changed = json.dumps({**entry, **fields})
            self._database.run("UPDATE batches SET entry = ?, is_over = ? WHERE id = ?", changed, is_over, batch_id)

    # ------------------------------------------------------------ answers

    def add_answer(self, batch_id: str, line: int, *, succeeded: bool, text: str) -> None:
        """Store the answer to the request in a line of the batch's file. A second answer changes nothing."""
        self._database.run("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", batch_id, line, succeeded, text)

    def answered(self, batch_id: str) -> set[int]:
        """Return the lines that have their answers."""
        return {line for (line,) in self._database.all("SELECT line FROM answers WHERE batch = ?", batch_id)}

    def finish(self, batch: StoredBatch, fields: Mapping[str, Any], unanswered: Mapping[int, str]) -> None:
        """Put the answers into files, and end the batch with these fields, all in one transaction.

        Args:
            unanswered: the text that stands in place of the answer to the request in each line that has none.

        Raises:
            sqlite3.Error: the disk is full, for example; nothing has changed then.
        """
        with self._database.transaction():
            for line, text in unanswered.items():
                self.add_answer(batch.id, line, succeeded=False, text=text)
            self._change(batch.id, {**fields, **self._answer_files(batch)}, is_over=True)
            self._database.run("DELETE FROM answers WHERE batch = ?", batch.id)

    def _answer_files(self, batch: StoredBatch) -> dict[str, str]:
        """Insert the files of the batch's answers; return their ids by the fields that name them."""
        files = {}
        for name, succeeded in (("output_file_id", True), ("error_file_id", False)):
            rows: Sequence[Any] = self._database.all(
                "SELECT text FROM answers WHERE batch = ? AND succeeded = ? ORDER BY line", batch.id, succeeded
            )
            if rows:
                content = "".join(f"{text}\n" for (text,) in rows).encode()
                kind = name.removesuffix("_file_id")
                files[name] = self._insert(batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", content)["id"]
        return files


def _counted(text: str, num_answers: int, num_succeeded: int) -> dict[str, Any]:
    """Return the entry with the numbers of requests that have answers, unless the answers are in files by now."""
    entry: dict[str, Any] = json.loads(text)
    if num_answers:
        counts = {"completed": num_succeeded, "failed": num_answers - num_succeeded}
        entry["request_counts"] = entry["request_counts"] | counts
    return entry
