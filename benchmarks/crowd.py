"""A crowd of sessions that step as fast as one server answers, from client processes that do next to nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from common import Fleet

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop
from swarm_client.swarm.caller import ClientIdentity
from swarm_client.transport.bundle import StepBundle
from swarm_client.transport.grpc_calls import GrpcStream
from swarm_client.transport.hops import HopSession, Inbox
from swarm_client.transport.transport import ServerConnection
from swarm_gateway.monitor.status import read_status
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.constants import FIRST_STEP, WIRE_VERSION
from swarm_protocol.wire.session_keys import new_session_key

CLIENTS = 2  # processes
RESERVE_TOKENS = 256  # of each session; then it begins again
_TIMEOUT_S = 60.0
_WARM_UP_S = 1.0


@dataclass(frozen=True)
class Crowd:
    """What a crowd saw, and what it cost the server.

    Attributes:
        steps_per_s: steps of one position, of all sessions together.
        cpu_us_per_step: processor time of the server.
        rows_per_batch: how many steps the server computed at once on average.
    """

    steps_per_s: float
    cpu_us_per_step: float
    rows_per_batch: float


@dataclass
class Row:
    """One session, which sends its next step as soon as the step before it is answered."""

    hop: HopSession
    bundle: StepBundle
    hidden: pb.Tensor
    num_steps: int = 0
    error: SwarmError | None = None

    @property
    def session_key(self) -> bytes:
        return self.hop.session_key

    def advance(self) -> None:
        start = self.num_steps % RESERVE_TOKENS
        number = FIRST_STEP + self.num_steps
        message = pb.Step(number=number, start_position=start, hidden=self.hidden, outputs_wanted=1, settled=True)
        self.bundle.post(self, message)

    def bundled_reply(self, reply: pb.SessionReply) -> None:
        if not reply.HasField("output"):
            self.error = SwarmError(f"a step was refused: {reply.failure.message}")
            return
        self.num_steps += 1
        self.advance()

    def bundle_lost(self, error: SwarmError) -> None:
        self.error = error


def crowd(servers: Fleet, num_rows: int, seconds: float) -> Crowd:
    """Measure the fleet's one server with so many sessions, which CLIENTS processes share."""
    (server,) = servers.servers
    (status,) = background.run(read_status(ClientConfig(swarm=servers.swarm))).models
    record = status.servers[0].record
    with _clients(record, servers.swarm, num_rows) as clients:
        time.sleep(_WARM_UP_S)
        before, start_s, start_cpu_s = _counts(clients), time.perf_counter(), server.cpu_s
        time.sleep(seconds)
        after, passed_s, cpu_s = _counts(clients), time.perf_counter() - start_s, server.cpu_s - start_cpu_s
    num_steps = after[0] - before[0]
    return Crowd(num_steps / passed_s, cpu_s * 1e6 / num_steps, num_steps / (after[1] - before[1]))


@contextmanager
def _clients(record: ServerRecord, swarm: str, num_rows: int):
    context = multiprocessing.get_context("forkserver")  # imports once for all clients
    context.set_forkserver_preload(["crowd"])
    processes, clients = [], []
    try:
        for _ in range(CLIENTS):
            here, there = context.Pipe()
            arguments = record.to_proto().SerializeToString(), swarm, num_rows // CLIENTS, there
            processes.append(context.Process(target=_client, args=arguments, daemon=True))
            processes[-1].start()
            clients.append(here)
        for client in clients:
            _told(client)
        yield clients
    finally:
        for client in clients:
            client.close()
        for process in processes:
            process.join(_TIMEOUT_S)
            process.kill()


def _counts(clients: list[Connection]) -> tuple[int, int]:
    """Return the steps of all clients so far, and the server's batches so far."""
    for client in clients:
        client.send("count")
    counts = [_told(client) for client in clients]
    return sum(steps for steps, _ in counts), max(batches for _, batches in counts)


def _told(client: Connection) -> tuple[int, int]:
    if not client.poll(_TIMEOUT_S):
        raise SwarmError(f"a client of the crowd says nothing for {_TIMEOUT_S:g} s")
    told = client.recv()
    if isinstance(told, str):
        raise SwarmError(told)
    return told


def _client(record: bytes, swarm: str, num_rows: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    server = ServerRecord.from_proto(pb.ServerRecord.FromString(record))
    try:
        asyncio.run(_step_until_closed(server, swarm, num_rows, parent))
    except SwarmError as error:
        parent.send(str(error))


async def _step_until_closed(record: ServerRecord, swarm: str, num_rows: int, parent: Connection) -> None:
    config = ClientConfig(swarm=swarm)
    identity = ClientIdentity(config)
    server = await identity.connect(record, config)
    stream = GrpcStream(server.stub.Steps(), record, record.span)
    bundle = await StepBundle.open(stream, _TIMEOUT_S, lambda: None)
    hidden, _ = encode(torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)))
    rows = [Row(await _opened(server, config, bundle), bundle, hidden) for _ in range(num_rows)]
    for row in rows:
        bundle.join(row)
        row.advance()
    parent.send((0, 0))
    while await _asked(parent):
        if error := next((row.error for row in rows if row.error), None):
            raise error
        progress = await rows[0].hop.progress(work=True)
        parent.send((sum(row.num_steps for row in rows), progress.num_batches))
    await server.close()
    await identity.close()


async def _asked(parent: Connection) -> bool:
    """Wait until the parent asks; return False if it has closed the connection."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(parent.fileno(), asked.set)
    await asked.wait()
    loop.remove_reader(parent.fileno())
    try:
        return bool(parent.recv())
    except EOFError:
        return False


async def _opened(server: ServerConnection, config: ClientConfig, bundle: StepBundle) -> HopSession:
    record = server.record
    blocks = pb.Span(start=record.span.start, end=record.span.end)
    contract = pb.Contract(wire_version=WIRE_VERSION, model=record.model, revision=record.revision, blocks=blocks)
    request = pb.Open(
        contract=contract,
        session_key=new_session_key(),
        batch_size=1,
        reserve_tokens=RESERVE_TOKENS,
        bundle_key=bundle.key,
        user=new_session_key().hex()[:8],
    )
    stream = GrpcStream(server.stub.Session(), record, record.span)
    hop = HopSession(0, Hop(record, record.span), stream, Inbox(), request, server, config.timeouts, bundle)
    await hop.open(request, _TIMEOUT_S)
    return hop
