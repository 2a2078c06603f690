"""Calls between peers that train, changed at random, over gRPC as it is; every answer is a refusal or the right one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import grpc
from google.protobuf.message import Message

from swarm_protocol.wire.status import CUT_OFF, FirstStatus
from tests.attack.fuzzing.conversations import Call
from tests.attack.fuzzing.mutations import mutated, mutated_bytes
from tests.attack.fuzzing.talking import judge

_DEADLINE_S = 60.0


async def answers(
    channel: grpc.aio.Channel, service: str, honest: Sequence[Call], seed: int, count: int
) -> dict[str, Counter[str]]:
    """How often each method was answered with each status, in so many calls; one in five is honest.

    Raises WrongAnswer if an answer is none that a peer may give."""
    found: dict[str, Counter[str]] = {call.method: Counter() for call in honest}
    for number in range(count):
        chance = Random(f"{seed}/{number}")
        call = chance.choice(honest)
        messages: tuple[Message | bytes, ...] = call.messages
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            messages = _changed(messages, chance)
        found[call.method][await _answer(channel, f"/{service}/{call.method}", Call(call.method, messages))] += 1
    return found


def _changed(messages: tuple[Message | bytes, ...], chance: Random) -> tuple[Message | bytes, ...]:
    """One of them is changed, or how many there are, or their order."""
    place, choice = chance.randrange(len(messages)), chance.random()
    before, message, after = messages[:place], messages[place], messages[place + 1 :]
    if choice < 0.65 and isinstance(message, Message):
        return (*before, mutated(message, chance), *after)
    if choice < 0.8 or len(messages) == 1:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return (*before, mutated_bytes(data, chance), *after)
    if choice < 0.9:
        return (*before, *[message] * chance.choice((0, 2, 9)), *after)
    return tuple(chance.sample(messages, len(messages)))


async def _answer(channel: grpc.aio.Channel, path: str, call: Call) -> str:
    rpc = channel.stream_stream(path)(timeout=_DEADLINE_S)
    first = FirstStatus(rpc)

    async def send() -> None:
        for data in call.data:
            await rpc.write(data)
        await rpc.done_writing()

    sending = asyncio.ensure_future(send())
    try:
        async for _ in rpc:
            pass
    except grpc.RpcError:
        pass
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()
    status, details = await first.instead_of(await rpc.code(), await rpc.details())
    if (status, details) == CUT_OFF:
        return "cut off"
    judge(call.method, status, details)
    return str(status.name)
