"""The worker that answers the requests of batches, while nobody else waits."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from swarm_gateway.batch_api.requests import BatchLine, read_lines
from swarm_gateway.batch_api.store import BatchStore, StoredBatch
from swarm_gateway.generation.beginning import ReceivedRequest
from swarm_gateway.generation.requests import EmbeddingRequest
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.openai_api.embeddings import embeddings
from swarm_gateway.openai_api.endpoints import answer_chunks
from swarm_gateway.web.http import Gateway, as_api_error
from swarm_protocol.failures import any_error_as
from swarm_protocol.process.routine import end_tasks

_LOOK_S = 1.0  # between two looks at the store, and at whether others wait
_RETRY_S = 10.0  # before a request is tried again that the swarm could not answer
_logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """A batch whose requests are being answered.

    Attributes:
        pending: the requests that nobody answers at present.
        resting_until_s: the time before which no request is begun, because the swarm has failed.
    """

    batch: StoredBatch
    pending: deque[BatchLine]
    running: dict[asyncio.Task[None], BatchLine] = field(default_factory=dict)
    resting_until_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return not self.pending and not self.running

    async def stop(self) -> list[BatchLine]:
        """End the requests that are being answered. Return all that have no answer, which are pending from now on."""
        left = [*self.running.values(), *self.pending]
        await end_tasks(list(self.running))
        self.pending = deque(left)
        return left

    def rest(self) -> None:
        """Begin no request for a while, because the swarm or the store has failed."""
        self.resting_until_s = time.monotonic() + _RETRY_S


class BatchWorker:
    """The worker that answers the requests of one batch of each key at a time, in the order of the file.

    A request is begun only while no generation waits for its turn, and all batches together have at most half of the
    generations that may be active. One event loop must make all calls.
    """

    def __init__(self, gateway: Gateway, store: BatchStore) -> None:
        self.store, self._gateway = store, gateway
        self._most = max(1, gateway.admission.limits.max_active // 2)
        self._jobs: dict[str, _Job] = {}  # by owner
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, or go on with, all batches that are not over."""
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look at the store at once, because a batch has come or is to be cancelled."""
        self._news.set()

    async def stop(self) -> None:
        """Stop. What is answered stays, and the rest is answered after the next start."""
        if self._task is not None:
            await end_tasks([self._task])
        for job in self._jobs.values():
            await job.stop()
        self._jobs.clear()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._look()
            except sqlite3.Error as error:  # such as a full disk: the batches go on once it has room
                _logger.warning("batches cannot go on at present: %s", error)
                await asyncio.sleep(_RETRY_S)
            await self._begin_lines()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self._jobs or self.store.is_shared else None):
                    await self._news.wait()

    async def _look(self) -> None:
        """Take new batches, and end those that are over, cancelled or too old."""
        for batch in await asyncio.to_thread(self.store.unfinished):
            job = self._jobs.get(batch.owner)
            if job is None:
                try:
                    job = self._jobs[batch.owner] = await self._job_of(batch)
                except ApiError:  # its file is gone
                    await self._end(batch, "failed")
                    continue
            if job.batch.id != batch.id and batch.entry["status"] != "cancelling":
                continue
            if batch.entry["status"] == "cancelling":
                await self._end(batch, "cancelled")
            elif time.time() > batch.entry["expires_at"]:
                await self._end(batch, "expired")
            elif job.is_over:
                await self._end(batch, "completed")

    async def _job_of(self, batch: StoredBatch) -> _Job:
        if batch.entry["in_progress_at"] is None:
            begun = {"status": "in_progress", "in_progress_at": int(time.time())}
            await asyncio.to_thread(self.store.change, batch.id, begun, only_if="validating")

        def pending() -> deque[BatchLine]:
            content = self.store.content(batch.owner, batch.entry["input_file_id"])
            answered = self.store.answered(batch.id)
            return deque(
                line for line in read_lines(content, batch.entry["endpoint"])[0] if line.number not in answered
            )

        return _Job(batch, await asyncio.to_thread(pending))

    async def _end(self, batch: StoredBatch, status: str) -> None:
        """End a batch with ``status``; requests without an answer have the code of why they have none."""
        job = self._jobs.get(batch.owner)
        left: list[BatchLine] = []
        if job is not None and job.batch.id == batch.id:
            left = await job.stop()  # they stay pending for the next try, if the store has no room now
        error = {"code": f"batch_{status}", "message": f"the batch was {status}"}
        now = int(time.time())
        ended = {"status": status, f"{status}_at": now, "finalizing_at": now}

        def finish() -> None:
            # All in one transaction: tens of thousands of them, one after the other, would hold up all other batches.
            unanswered = {line.number: _answer_text(line, error=error) for line in left}
            self.store.finish(batch, ended, unanswered)

        await asyncio.to_thread(finish)  # the texts are made there too, which takes up to a second
        if job is not None and job.batch.id == batch.id:
            del self._jobs[batch.owner]
        self._news.set()  # the next batch of this key may begin

    async def _begin_lines(self) -> None:
        """Begin requests, one of each batch in turn, while there is room for them."""
        admission, now_s = self._gateway.admission, time.monotonic()
        load = await admission.load()
        num_running = sum(len(job.running) for job in self._jobs.values())
        num_free = min(self._most - num_running, admission.limits.max_active - load.num_active)
        if load.num_queued:
            return
        while num_free > 0:
            ready = [job for job in self._jobs.values() if job.pending and job.resting_until_s <= now_s]
            if not ready:
                return
            for job in ready[:num_free]:
                line = job.pending.popleft()
                task = asyncio.create_task(self._answer(job, line))
                job.running[task] = line
                num_free -= 1

    async def _answer(self, job: _Job, line: BatchLine) -> None:
        try:
            await self._try(job, line)
        except sqlite3.Error as error:
            _logger.warning("an answer of a batch cannot be stored at present: %s", error)
            job.pending.append(line)
            job.rest()
        finally:
            task = asyncio.current_task()
            assert task is not None
            job.running.pop(task, None)
            self._news.set()

    async def _try(self, job: _Job, line: BatchLine) -> None:
        """Answer one request, and store the answer; or put the request back if the swarm cannot answer now."""
        key, began_s = f"batch of {job.batch.owner}", time.perf_counter()
        received: ReceivedRequest[Any] = ReceivedRequest(self._gateway, key, line.asked, line.num_bytes, began_s)
        chunks = embeddings(received) if isinstance(line.asked, EmbeddingRequest) else answer_chunks(received)
        status = 200
        try:
            with any_error_as(as_api_error):  # whatever a request may fail with, its line says so
                body = json.loads(b"".join([chunk async for chunk in chunks]))
        except ApiError as error:
            if error.status in (429, 503):
                job.pending.appendleft(line)
                job.rest()
                return
            status, body = error.status, error.body
        finally:
            await chunks.aclose()
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        text = _answer_text(line, response=response)
        await asyncio.to_thread(self.store.add_answer, job.batch.id, line.number, succeeded=status == 200, text=text)


def _answer_text(
    line: BatchLine, *, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> str:
    """Return the line of an answer, in the shape of OpenAI's files, without the end of the line."""
    said = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(said, ensure_ascii=False)
