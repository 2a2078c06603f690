"""A prefetcher of batches in a thread, so that reading and tokenising overlap with computing."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from swarm_protocol.failures import Closing
from swarm_training.data.blocks import BlockBatches
from swarm_training.data.streaming import StreamBatches


class Prefetcher(Closing):
    """A series of batches that keeps up to ``depth`` batches of another series ready. Close it, or use ``with``."""

    def __init__(self, batches: BlockBatches | StreamBatches, depth: int = 2) -> None:
        self._batches = batches
        self._depth = depth
        self._state = batches.state_dict()
        self._ready: deque[tuple[torch.Tensor, dict[str, Any]]] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)
        self._thread.start()

    def next_batch(self) -> torch.Tensor:
        """Return the next batch. Raise the error that reading the data has raised, after the batches before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._ready and not self._closed:
                batch, self._state = self._ready.popleft()
                self._changed.notify_all()
                return batch
        raise self._error or ValueError("the loader is closed: expected no call after close")

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that ``next_batch`` returned, whatever was read ahead."""
        return self._state

    def close(self) -> None:
        """Wait until the thread has ended, after its current batch. This may be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _produce(self) -> None:
        try:
            while self._has_room():
                batch = self._batches.next_batch()
                state = self._batches.state_dict()
                with self._changed:
                    self._ready.append((batch, state))
                    self._changed.notify_all()
        except BaseException as error:  # raised again by ``next_batch``
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until fewer than ``depth`` batches are ready. Return False once the loader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed
