"""The admission of a gateway with several processes: one process decides, and the others ask it over Unix sockets.

A message is a line of JSON. A worker sends ``[number, method, arguments]``, and ``[number, "leave", [index]]`` for a
place that it got by its request ``number``. It receives ``[number, result, refusal]``, and ``[number, index]`` when the
turn of a place has come.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any

from swarm_gateway.limits.admission import (
    ApiError,
    GatewayLimits,
    LocalAdmission,
    QueueLoad,
    QueueName,
    QueuePlace,
)
from swarm_protocol.process.routine import end_tasks

PlaceId = tuple[int, int]  # the number of the request for the place, and the place's index in the answer


class AdmissionService:
    """The admission as one worker sees it, in the process that decides. The worker's places end with ``serve``."""

    def __init__(
        self, admission: LocalAdmission, connection: socket.socket, on_ready: Callable[[Sequence[str]], None]
    ) -> None:
        """Take over the connection to the worker. ``on_ready`` gets the lines of ``RemoteAdmission.say_ready``."""
        self._admission, self._connection, self._on_ready = admission, connection, on_ready
        self._places: dict[PlaceId, tuple[QueuePlace, asyncio.Task[None]]] = {}

    async def serve(self) -> None:
        """Answer the worker until its connection ends. In the end, give back all places that it still has."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        try:
            with suppress(ConnectionError, json.JSONDecodeError):  # the worker was killed, perhaps within a message
                async for line in reader:
                    await self._take(*json.loads(line))
        finally:
            self._writer.close()
            telling = [task for _, task in self._places.values()]
            for place, _ in self._places.values():
                place.leave()
            await end_tasks(telling)

    async def _take(self, number: int, method: str, arguments: list[Any]) -> None:
        if method == "leave":
            if (found := self._places.pop((number, *arguments), None)) is not None:
                place, telling = found
                telling.cancel()
                place.leave()
        elif method == "ready":
            self._on_ready(*arguments)
        else:
            try:
                self._send(number, await self._answer(number, method, arguments), None)
            except ApiError as error:
                told = {"status": error.status, **error.body["error"], "retry_after_s": error.retry_after_s}
                self._send(number, None, told)

    async def _answer(self, number: int, method: str, arguments: list[Any]) -> Any:
        if method == "count":
            await self._admission.count(*arguments)
            return None
        if method == "load":
            return astuple(await self._admission.load())
        assert method == "join", method
        places = await self._admission.join(*arguments)
        for index, place in enumerate(places):
            telling = asyncio.create_task(self._tell_turn(place, number, index))
            self._places[number, index] = place, telling
        return places[0].user

    async def _tell_turn(self, place: QueuePlace, number: int, index: int) -> None:
        await place.turn.wait()
        self._send(number, index)

    def _send(self, *message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


class RemoteAdmission:
    """A worker's side of ``AdmissionService``. Its calls raise ApiError if the process that decides is gone."""

    def __init__(self, limits: GatewayLimits, connection: socket.socket) -> None:
        """Take over the connection. ``limits``: those of the process that decides."""
        self.limits, self._connection = limits, connection
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._turns: dict[PlaceId, tuple[QueueName, asyncio.Event]] = {}  # of the places that this worker has
        self._is_lost = False

    async def start(self, on_lost: Callable[[], None]) -> None:
        """Begin to read answers. ``on_lost`` is called when the process that decides is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self._reading = asyncio.create_task(self._read(reader, on_lost))

    def say_ready(self, greeting: Sequence[str]) -> None:
        """Say that this worker accepts connections; ``greeting``: what the gateway prints when all workers do."""
        self._send(next(self._numbers), "ready", [greeting])

    @property
    def own_load(self) -> QueueLoad:
        turns = [turn for queue, turn in list(self._turns.values()) if queue == "generations"]
        num_active = sum(turn.is_set() for turn in turns)
        return QueueLoad(num_active, len(turns) - num_active)

    async def count(self, key: str) -> None:
        await self._ask(next(self._numbers), "count", key)

    async def join(self, key: str, count: int, queue: QueueName = "generations") -> list[QueuePlace]:
        number = next(self._numbers)
        turns = {(number, index): asyncio.Event() for index in range(count)}
        self._turns |= {place_id: (queue, turn) for place_id, turn in turns.items()}  # a turn may come at once
        try:
            user = await self._ask(number, "join", key, count, queue)
        except (ApiError, asyncio.CancelledError):  # refused, or the client has left
            for place_id in turns:
                self._leave(place_id)
            raise
        return [QueuePlace(partial(self._leave, place_id), key, user, turn) for place_id, turn in turns.items()]

    async def load(self) -> QueueLoad:
        return QueueLoad(*await self._ask(next(self._numbers), "load"))

    def _leave(self, place_id: PlaceId, _place: QueuePlace | None = None) -> None:
        if self._turns.pop(place_id, None) is not None and not self._is_lost:
            number, index = place_id
            self._send(number, "leave", [index])

    async def _ask(self, number: int, method: str, *arguments: Any) -> Any:
        if self._is_lost:
            raise _lost()
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, method, arguments)
            return await answer
        finally:
            del self._answers[number]

    async def _read(self, reader: asyncio.StreamReader, on_lost: Callable[[], None]) -> None:
        try:
            with suppress(ConnectionError):
                async for line in reader:
                    self._take(*json.loads(line))
        finally:
            self._is_lost = True
            self._writer.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(_lost())
            on_lost()

    def _take(self, number: int, result: Any, *refusal: dict[str, Any] | None) -> None:
        if not refusal:  # the turn of a place
            if (found := self._turns.get((number, result))) is not None:
                found[1].set()
        elif (answer := self._answers.get(number)) is not None and not answer.done():
            if refusal[0] is None:
                answer.set_result(result)
            else:
                told = refusal[0]
                fields = {name: told[name] for name in ("param", "code", "retry_after_s")}
                answer.set_exception(ApiError(told["status"], told["message"], **fields))

    def _send(self, *message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


def _lost() -> ApiError:
    return ApiError(503, "this gateway is ending", code="ending")
