"""Several processes ask one admission: its limits hold across all of them, and a dead worker's places come back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from swarm_gateway.limits.admission import ApiError, GatewayLimits, LocalAdmission, QueueLoad
from swarm_gateway.limits.remote_admission import AdmissionService, RemoteAdmission
from swarm_protocol.process.routine import end_tasks
from tests.unit.support import until

LIMITS = GatewayLimits(max_active=2, max_queued=4, requests_per_minute=3)


@dataclass
class Worker:
    """Both ends of one worker's connection. ``kill`` ends the worker's own end as the end of its process does."""

    remote: RemoteAdmission
    connection: socket.socket
    serving: asyncio.Task[None]
    greeting: list[str]
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill(self) -> None:
        await end_tasks([self.remote._reading])
        await self.serving


@asynccontextmanager
async def workers(admission: LocalAdmission, count: int) -> AsyncIterator[list[Worker]]:
    started: list[Worker] = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            greeting: list[str] = []
            serving = asyncio.create_task(AdmissionService(admission, ours, greeting.extend).serve())
            stack.push_async_callback(end_tasks, [serving])
            worker = Worker(RemoteAdmission(admission.limits, theirs), theirs, serving, greeting)
            await worker.remote.start(worker.lost.set)
            stack.push_async_callback(end_tasks, [worker.remote._reading])
            started.append(worker)
        yield started


async def test_the_rate_of_a_key_holds_over_all_workers() -> None:
    async with workers(LocalAdmission(LIMITS, clock=lambda: 0.0), 2) as (one, two):
        for worker in (one, two, one):
            await worker.remote.count("ada")
        with pytest.raises(ApiError, match="3 requests per minute") as refused:
            await two.remote.count("ada")
        await two.remote.count("bob")
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "60")
    assert refused.value.body["error"]["code"] == "rate_limit_exceeded"


async def test_turns_go_round_robin_over_the_keys_of_all_workers() -> None:
    async with workers(LocalAdmission(GatewayLimits(max_active=1, max_queued=9), is_shared=True), 2) as (one, two):
        (active,) = await one.remote.join("ada", 1)
        await asyncio.wait_for(active.turn.wait(), 60)
        first, second = await one.remote.join("ada", 2)
        (other,) = await two.remote.join("bob", 1)
        assert first.user == active.user != other.user
        assert await one.remote.load() == await two.remote.load() == QueueLoad(1, 3)
        assert (one.remote.own_load, two.remote.own_load) == (QueueLoad(1, 2), QueueLoad(0, 1))
        order = []
        waiting = {"ada 1": first, "ada 2": second, "bob": other}
        active.leave()
        active.leave()
        while waiting:
            await until(lambda: any(place.turn.is_set() for place in waiting.values()))
            (name,) = [name for name, place in waiting.items() if place.turn.is_set()]
            order.append(name)
            waiting.pop(name).leave()
        assert order == ["ada 1", "bob", "ada 2"]
        await until(lambda: one.remote.own_load == QueueLoad(0, 0))


async def test_the_places_are_those_of_all_workers_together() -> None:
    async with workers(LocalAdmission(LIMITS), 2) as (one, two):
        places = await one.remote.join("", 4)
        await two.remote.join("", 2)
        with pytest.raises(ApiError, match="2 generations are active and 4 wait") as full:
            await two.remote.join("", 1)
        assert full.value.body["error"]["code"] == "queue_full" and full.value.status == 429
        assert two.remote.own_load == QueueLoad(0, 2)  # none is left of what was refused
        places[0].leave()
        assert await one.remote.load() == QueueLoad(2, 3)  # the place is free
        await two.remote.join("", 1)


async def test_the_places_of_a_dead_worker_come_back() -> None:
    admission = LocalAdmission(LIMITS)
    async with workers(admission, 2) as (one, two):
        await one.remote.join("", 6)
        await one.remote.join("", 1, "preparations")
        with pytest.raises(ApiError):
            await two.remote.join("", 1)
        one.connection.send(b'[99, "jo')  # it is killed within a message
        await one.kill()
        (place,) = await two.remote.join("", 1)
        await asyncio.wait_for(place.turn.wait(), 60)
        (preparing,) = await two.remote.join("", 1, "preparations")
        await asyncio.wait_for(preparing.turn.wait(), 60)
        assert await two.remote.load() == QueueLoad(1, 0)


async def test_a_client_that_leaves_while_it_is_admitted_keeps_no_place() -> None:
    admission = LocalAdmission(LIMITS)
    async with workers(admission, 1) as (worker,):
        joining = asyncio.create_task(worker.remote.join("", 6))
        await asyncio.sleep(0)  # the request is on its way
        joining.cancel()
        await asyncio.wait([joining])
        await until(lambda: joining.cancelled() and admission.own_load == QueueLoad(0, 0))
        assert len(await worker.remote.join("", 6)) == 6


async def test_a_worker_learns_that_the_process_that_decides_is_gone() -> None:
    async with workers(LocalAdmission(LIMITS), 1) as (worker,):
        worker.remote.say_ready(["serving on here"])
        (place,) = await worker.remote.join("", 1)
        assert worker.greeting == ["serving on here"]
        asking = asyncio.create_task(worker.remote.load())
        await end_tasks([worker.serving])
        await worker.lost.wait()
        for late in (asking, worker.remote.count("ada")):
            try:
                await late
            except ApiError as error:
                assert json.loads(json.dumps(error.body))["error"]["code"] == "ending"
        place.leave()
