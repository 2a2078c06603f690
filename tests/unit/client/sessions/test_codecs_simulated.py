"""In which codecs a session's hidden states travel, whatever becomes of its servers and of what is known of links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.sessions.opening import SessionOptions, SessionPurpose
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.links import Links
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.codecs.sizes import ANNOUNCED
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.client.sessions.test_stalls_simulated import Beside, claim
from tests.unit.client.sessions.test_survival_simulated import quiet, run
from tests.unit.support import until
from tests.worlds.servers import NUM_BLOCKS, Context

pytestmark = pytest.mark.run_by(function=run)


class Listening:
    """A service that notes in which codec hidden states come from clients."""

    def __init__(self, honest: Any) -> None:
        self._honest = honest
        self.codecs: list[pb.Codec] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    async def Session(self, requests: AsyncIterator[Any], context: Context) -> None:
        async def noted() -> AsyncIterator[Any]:
            async for request in requests:
                if request.HasField("step"):
                    self.codecs.append(request.step.hidden.codec)
                yield request

        await self._honest.Session(noted(), context)


class Compressed(Beside):
    """Servers ``honest0`` and on, which know all codecs."""

    async def compressed(self, *spans: str, **options: Any) -> RemoteSession:
        await self.beside(*spans, **options)
        self.listening = {name: self.listen(name, ANNOUNCED) for name in self.net.servers}
        return self.new_session()

    def listen(self, name: str, codecs: tuple[str, ...]) -> Listening:
        server = self.net.servers[name]
        claim(server, codecs=codecs)
        server.service = listening = Listening(server.service)
        return listening


async def step(session: RemoteSession, num_positions: int) -> None:
    positions = torch.arange(session.length, session.length + num_positions)[None]
    await session.step_on_loop(BlockInput(torch.ones(1, num_positions, 1), None, positions), 1)


async def test_a_session_keeps_its_codecs() -> None:
    async with quiet(kind=Compressed) as swarm:
        session = await swarm.compressed("0:3", "3:6", compression="int4")
        await step(session, 3)
        before = session._lanes[0].chain.codecs
        assert before == (pb.INT4_BLOCKS,) * 3
        swarm.swarm.links = Links(
            ClientConfig(compression="raw"), swarm.swarm.server, NUM_BLOCKS
        )  # what was measured is forgotten
        await step(session, 1)
        assert session._lanes[0].chain.codecs == before
        (codecs,) = (each.codecs for name, each in swarm.listening.items() if name == swarm.hops(session)[0])
        assert set(codecs) == {pb.INT4_BLOCKS}


async def test_all_servers_know_whom_a_prompt_is_for_and_what_is_left_of_it() -> None:
    async with quiet(kind=Compressed) as swarm:
        await swarm.beside("0:3", "3:6")
        seen: dict[str, list[tuple[int, int, str, bool]]] = {}
        for name, server in swarm.net.servers.items():
            scheduler, seen[name] = server.host.services.scheduler, []
            compute = scheduler.step

            async def step_of(
                session: Any, step: Any, client: str, user: str, *, is_background: bool, name=name, compute=compute
            ) -> Any:
                seen[name].append((step.inputs.hidden.shape[1], step.num_following, user, is_background))
                return await compute(session, step, client, user, is_background=is_background)

            scheduler.step = step_of
        purpose = SessionPurpose("anna", is_background=True)
        swarm.session = session = RemoteSession(swarm.swarm, Span(0, NUM_BLOCKS), None, SessionOptions(purpose=purpose))
        await step(session, 300)
        await step(session, 1)
        for first, *others, last in seen.values():
            assert others and last == (1, 0, "anna", True)
            left = 300
            for size, *told in [first, *others]:
                left -= size
                assert told == [left, "anna", True]


async def test_hops_in_the_place_of_others_have_the_codecs_of_their_own_links() -> None:
    async with quiet(kind=Compressed) as swarm:
        session = await swarm.compressed("0:3", "3:6", "0:3", "3:6", compression="int4")
        await step(session, 3)
        swarm.swarm.links = Links(ClientConfig(compression="int8"), swarm.swarm.server, NUM_BLOCKS)
        swarm.net.kill(swarm.hops(session)[1])
        await step(session, 1)
        assert session._lanes[0].chain.codecs == (pb.INT4_BLOCKS, pb.INT8_BLOCKS, pb.INT8_BLOCKS)
        swarm.net.kill(swarm.hops(session)[0])
        await step(session, 1)
        assert session._lanes[0].chain.codecs == (pb.INT8_BLOCKS,) * 3


async def test_links_to_servers_in_the_place_of_others_are_measured() -> None:
    async with quiet(kind=Compressed) as swarm:
        session = await swarm.compressed("0:3", "3:6", "0:3", "3:6")
        measured: set[str] = set()

        async def connection(server: ServerRecord) -> ServerConnection:
            measured.add(server.peer_id)
            return await swarm.swarm.server(server)

        swarm.swarm.links = Links(ClientConfig(), connection, NUM_BLOCKS)
        await step(session, 3)
        for index in (1, 0):
            swarm.net.kill(swarm.hops(session)[index])
            await step(session, 1)
        await asyncio.sleep(1.0)
        assert measured == set(swarm.listening)


async def test_an_older_server_in_the_place_of_the_first_is_sent_what_it_knows() -> None:
    """A call's steps were encoded for the one that has died."""
    async with quiet(kind=Compressed) as swarm:
        session = await swarm.compressed("0:3", "3:6", "0:3", compression="int4")
        await step(session, 3)
        first = swarm.hops(session)[0]
        (spare,) = swarm.listening.keys() - swarm.hops(session)
        older = swarm.listen(spare, ())
        await swarm.swarm.view(0.0)
        num_before = len(swarm.listening[first].codecs)
        call = asyncio.ensure_future(step(session, 20))
        await until(lambda: len(swarm.listening[first].codecs) > num_before)
        swarm.net.kill(first)
        await call
        assert swarm.hops(session)[0] == spare
        assert older.codecs[0] == pb.INT8_BLOCKS and set(older.codecs[1:]) == {pb.RAW}  # the history, and the call
