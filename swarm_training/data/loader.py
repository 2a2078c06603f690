"""A prefetcher of batches in a thread, so that reading and tokenising overlap with computing."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from swarm_protocol.failures import Closing
from swarm_training.data.blocks import BlockBatches
from swarm_training.data.streaming import StreamBatches


class Prefetcher(Closing):
    """A series of batches that keeps up to ``depth`` batches of another series ready. Close it, or use ``with``."""

    def __init__(self, batches: BlockBatches | StreamBatches, depth: int = 2) -> None:
        self._batches = batches
        self._state = batches.state_dict()
        self._closed: Future[None] = Future()
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead = deque(self._thread.submit(self._read) for _ in range(depth))

    def next_batch(self) -> torch.Tensor:
        """Return the next batch. Raise the error that reading the data has raised, after the batches before it."""
        either: list[Future[Any]] = [self._ahead[0], self._closed]
        wait(either, return_when=FIRST_COMPLETED)
        if self._closed.done():
            raise ValueError("the loader is closed: expected no call after close")
        batch, self._state = self._ahead[0].result()
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(self._read))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that ``next_batch`` returned, whatever was read ahead."""
        return self._state

    def close(self) -> None:
        """Wait until the thread has ended, after its current batch. This may be called again."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._thread.shutdown(cancel_futures=True)

    def _read(self) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._batches.next_batch(), self._batches.state_dict()
