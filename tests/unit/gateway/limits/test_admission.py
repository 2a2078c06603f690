"""Keys, limits, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_gateway.limits.admission import (
    ApiError,
    GatewayLimits,
    GenerationQueue,
    QueuePlace,
    RateLimit,
    check_key,
    read_keys,
)


def has_turn(*places: QueuePlace) -> list[bool]:
    return [place.turn.is_set() for place in places]


def test_turns_go_round_robin_over_keys() -> None:
    queue = GenerationQueue(GatewayLimits(max_active=1, max_queued=10))
    (active,) = queue.join("a", 1)
    many, (other,), (third,) = queue.join("a", 3), queue.join("b", 1), queue.join("c", 1)
    order = []
    waiting = {"a1": many[0], "a2": many[1], "a3": many[2], "b": other, "c": third}
    active.leave()
    while waiting:
        (name,) = [name for name, place in waiting.items() if place.turn.is_set()]
        order.append(name)
        waiting.pop(name).leave()
    assert order == ["a1", "b", "c", "a2", "a3"]
    assert queue.num_active == queue.num_queued == 0


def test_as_many_are_active_as_may_be() -> None:
    queue = GenerationQueue(GatewayLimits(max_active=2, max_queued=2))
    first, second, third = queue.join("a", 3)
    assert has_turn(first, second, third) == [True, True, False]
    assert (queue.num_active, queue.num_queued) == (2, 1)
    with pytest.raises(ApiError) as full:
        queue.join("b", 2)
    assert full.value.status == 429 and "Retry-After" in full.value.headers
    assert (queue.num_active, queue.num_queued) == (2, 1)
    first.leave()
    first.leave()
    assert has_turn(third) == [True] and queue.num_active == 2


async def test_who_gives_up_waiting_is_passed_over() -> None:
    queue = GenerationQueue(GatewayLimits(max_active=1, max_queued=9))
    (active,), (gone,), (next_,) = queue.join("a", 1), queue.join("b", 1), queue.join("c", 1)
    task = asyncio.create_task(gone.__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gone.leave()
    active.leave()
    assert has_turn(gone, next_) == [False, True] and queue.num_queued == 0


def test_requests_per_minute_by_a_clock_of_our_own() -> None:
    now = 0.0
    rate = RateLimit(2, lambda: now)
    rate.count("a")
    now = 20.0
    rate.count("a")
    rate.count("b")
    now = 30.5
    with pytest.raises(ApiError) as refused:
        rate.count("a")
    assert refused.value.headers["Retry-After"] == "30"
    now = 60.0
    rate.count("a")
    with pytest.raises(ApiError):
        rate.count("a")


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nsk-ada\n\n  sk-bob \n")
    assert read_keys(path) == ("sk-ada", "sk-bob")
    for content in ("", "# nobody\n", "sk-ada\ntwo words\n", "schlüssel\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="keys"):
            read_keys(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")


@pytest.mark.parametrize("header", [None, "", "sk-ada", "Basic sk-ada", "Bearer ", "Bearer sk", "Bearer schlüssel"])
def test_other_headers_are_no_key(header: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        check_key(("sk-ada", "sk-bob"), header)
    assert refused.value.status == 401 and refused.value.headers["WWW-Authenticate"] == "Bearer"


def test_a_key_is_found() -> None:
    assert check_key(("sk-ada", "sk-bob"), "bearer sk-bob") == "sk-bob"


NUM_QUEUED = 7


def queues() -> Iterator[tuple[GenerationQueue, tuple[int, int, int]]]:
    """One in each state that three keys can bring it into by joining, one generation at a time, behind an active one.

    With how many of each key wait.
    """
    seen, reached = set(), [(0, 0, 0)]
    while reached:
        waiting = reached.pop()
        if waiting in seen:
            continue
        seen.add(waiting)
        queue = filled(waiting)
        for key in range(3):
            if queue._fits(str(key), 1):
                reached.append(tuple(count + (other == key) for other, count in enumerate(waiting)))
        yield queue, waiting


def filled(waiting: tuple[int, ...]) -> GenerationQueue:
    queue = GenerationQueue(GatewayLimits(max_active=1, max_queued=NUM_QUEUED))
    queue.join("active", 1)
    for key, count in enumerate(waiting):
        queue._waiting.update(
            {str(key): deque(QueuePlace(queue.leave, str(key)) for _ in range(count))} if count else {}
        )
    return queue


def test_no_key_takes_the_places_of_others() -> None:
    states = list(queues())
    assert len(states) > 20
    for queue, waiting in states:
        assert max(waiting) <= (NUM_QUEUED + 1) // 2
        if sum(waiting) < NUM_QUEUED:  # somebody new gets a place while there is one
            (place,) = queue.join("new", 1)
            assert place in queue._waiting["new"]
        else:
            with pytest.raises(ApiError):
                queue.join("new", 1)


def test_a_request_of_many_generations_takes_no_more_than_single_ones() -> None:
    for queue, waiting in queues():
        for count in range(1, NUM_QUEUED + 1):
            one_by_one = all(filled((waiting[0] + more, *waiting[1:]))._fits("0", 1) for more in range(count))
            assert queue._fits("0", count) <= one_by_one
    queue = GenerationQueue(GatewayLimits(max_active=2, max_queued=8))
    with pytest.raises(ApiError) as refused:
        queue.join("a", 7)
    assert refused.value.status == 400
    assert len(queue.join("a", 6)) == 6 and queue.num_active == 2
    with pytest.raises(ApiError) as refused:
        queue.join("a", 1)
    assert refused.value.status == 429
    queue.join("b", 2)


def test_one_key_alone_has_the_whole_queue() -> None:
    assert len(GenerationQueue(GatewayLimits(max_active=1, max_queued=8), is_shared=False).join("", 9)) == 9
