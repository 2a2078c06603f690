"""Prefetching changes neither batches nor states, hands errors on, and ends when it is closed."""

from __future__ import annotations

import threading

import pytest
import torch

from swarm_training.data.loader import Prefetcher


class Counting:
    """Batches 0, 1, 2, …, of which the first ``free`` are ready at once and further ones when they are let go."""

    def __init__(self, free: int = 1 << 30, fails_at: int = -1) -> None:
        self.next = 0
        self.free = threading.Semaphore(free)
        self.fails_at = fails_at
        self.read = threading.Semaphore(0)  # released at each batch that was read

    def next_batch(self) -> torch.Tensor:
        self.free.acquire()
        if self.next == self.fails_at:
            raise ValueError("line 7 of a file is wrong")
        self.next += 1
        self.read.release()
        return torch.tensor(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}


def test_batches_and_states_are_those_without_it() -> None:
    batches = Counting()
    with Prefetcher(batches, depth=3) as loader:
        assert loader.state_dict() == {"next": 0}
        for number in range(20):
            assert loader.next_batch() == number
            assert loader.state_dict() == {"next": number + 1}
            assert number + 1 <= batches.next <= number + 1 + 4


def test_it_reads_ahead_as_far_as_it_may_and_no_further() -> None:
    batches = Counting()
    with Prefetcher(batches, depth=3):
        for _ in range(3):
            assert batches.read.acquire(timeout=60)
        assert not batches.read.acquire(timeout=0.05)
        assert batches.next == 3


def test_an_error_comes_after_the_batches_before_it_and_stays() -> None:
    with Prefetcher(Counting(fails_at=2)) as loader:
        assert [int(loader.next_batch()) for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="line 7 of a file is wrong"):
                loader.next_batch()


@pytest.mark.parametrize("taken", [0, 1])
def test_closing_ends_the_thread_with_a_full_buffer_and_one_that_waits(taken: int) -> None:
    loader = Prefetcher(Counting(), depth=2)
    for _ in range(taken):
        loader.next_batch()
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    with pytest.raises(ValueError, match="the loader is closed"):
        loader.next_batch()


def test_closing_wakes_who_waits_for_a_batch() -> None:
    batches = Counting(free=0)
    loader = Prefetcher(batches)
    (reading,) = [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert reading.daemon, "a read that never ends would keep the process"
    errors: list[str] = []

    def wait() -> None:
        try:
            loader.next_batch()
        except ValueError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing = threading.Thread(target=loader.close)
    closing.start()
    waiting.join(60)
    batches.free.release()  # the source itself cannot be interrupted
    closing.join(60)
    assert not closing.is_alive() and errors == ["the loader is closed: expected no call after close"]
