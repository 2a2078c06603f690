"""For tests of survival: real server processes that are killed, stopped and told to leave, at chosen moments."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_client.core.events import Event, Move, Recovery, Waiting
from swarm_client.sessions.chain import Chain
from swarm_client.sessions.session import RemoteSession
from swarm_client.transport.hops import HopOutput, HopSession
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.errors import SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import FIRST_STEP
from tests.swarm.pair import NEW_TOKENS, ends_only_at_its_length
from tests.swarm.raw_client import RawClient
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import BLOCKS, save_checkpoint

SPANS = ("0:2", "2:4", "4:6")
ROOM = 2048  # tokens of each server
Action = Callable[[], object]  # or a coroutine function, but not before a step


class Fleet:
    """Two servers for each span, in a swarm of their own: a fast one, and one that clients take if they must.

    Those that a test ends are back, as themselves, for the next.

    Attributes:
        whole: the model in this process.
    """

    def __init__(self, cluster: LocalCluster, directory: Path, name: str = "near") -> None:
        self.model = directory / "llama"
        self.swarm = f"survival-{name}-{os.getpid()}"
        save_checkpoint("llama", self.model)
        self.whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32))
        self._cluster = cluster
        self._options: dict[Path, list[str]] = {}  # by identity file
        for throughput in ("100", "50"):
            for blocks in SPANS:
                identity = directory / f"{blocks.replace(':', '-')}-{throughput}"
                options = [blocks, "--throughput", throughput, "--identity", str(identity)]
                self._options[identity] = options
        self._members: dict[Path, LocalServer] = {}
        self._guests: list[LocalServer] = []

    def add(self, blocks: str, *options: str, cluster: LocalCluster | None = None) -> LocalServer:
        """One more server, until the fleet is restored; returns at once."""
        self._guests.append(self._start(blocks, *options, cluster=cluster))
        return self._guests[-1]

    def wait_ready(self, *servers: LocalServer) -> None:
        self._cluster.wait_ready(servers)

    def restore(self) -> None:
        """All members are there, and nobody else."""
        for server in self.running:
            server.signal(signal.SIGCONT)
        for guest in self._guests:
            guest.signal(signal.SIGTERM)
        for guest in self._guests:
            assert guest.wait_gone(DEADLINE_S), guest.stderr.read_text()
        self._guests.clear()
        for identity, options in self._options.items():
            member = self._members.get(identity)
            if member is None or not member.alive:
                self._members[identity] = self._start(*options)
        self._cluster.wait_ready(self.running)

    @property
    def running(self) -> list[LocalServer]:
        return [server for server in [*self._members.values(), *self._guests] if server.alive]

    def find(self, peer_id: str) -> LocalServer:
        (server,) = [server for server in self.running if server.ready and server.peer_id == peer_id]
        return server

    def replicas(self, blocks: str) -> list[LocalServer]:
        return [server for server in self.running if server.ready and server.ready["blocks"] == blocks]

    def kill_replicas(self, blocks: str, but: LocalServer | None = None) -> list[LocalServer]:
        servers = [server for server in self.replicas(blocks) if server is not but]
        for server in servers:
            server.kill()
        return servers

    def wait_until_all_room_is_free(self) -> None:
        for server in self.running:  # one that was killed counts as running until the kernel has closed its sockets
            wait_for(
                lambda server=server: not server.alive or room_left(server) == ROOM,
                f"the server of blocks {server.ready['blocks']} has all its room for keys and values back",
            )

    def _start(self, blocks: str, *options: str, cluster: LocalCluster | None = None) -> LocalServer:
        known = ["--model", str(self.model), "--swarm", self.swarm, "--quant", "none", "--throughput", "75"]
        return (cluster or self._cluster).start(*known, "--cache-tokens", str(ROOM), "--blocks", blocks, *options)


def room_left(server: LocalServer) -> int | None:
    """In tokens, as the server itself says; None if it is gone."""
    host, port = server.ready["grpc"].split(":")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))
        record = ServerRecord(
            server.peer_id,
            (server.ready["grpc"],),
            model=server.ready["model"],
            revision="",
            num_blocks=BLOCKS,
            span=Span.parse(server.ready["blocks"]),
            tls_fingerprint=hashlib.sha256(certificate).digest(),
        )
        with RawClient(record) as client:
            return client.describe().cache_tokens_left
    except (OSError, SwarmError):
        return None


class Client:
    """A client of the fleet whose tokens are compared with those of the whole model.

    Attributes:
        events: what has happened to its sessions.
    """

    def __init__(self, fleet: Fleet, **options: Any) -> None:
        self.fleet = fleet
        self.events: list[Event] = []
        self._listeners: list[Callable[[Event], None]] = [self.events.append]
        options = {"swarm": fleet.swarm, "on_event": self._heard, "draft": "none", **options}
        self.model = ends_only_at_its_length(DistributedModel.from_pretrained(str(fleet.model), **options))
        self.wait_until_it_knows_all()

    def wait_until_it_knows_all(self) -> None:
        """The record of a server may have gone with the members that stored it; it comes again within a minute."""
        wait_for(self._knows_all, "the client knows all servers")

    def generate(self, ids: torch.Tensor, **options: Any) -> Any:
        """What ``generate`` returns. Its tokens are those of the whole model."""
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
        torch.manual_seed(3)
        expected = self.fleet.whole.generate(ids, **{**options, "past_key_values": None})
        torch.manual_seed(3)
        output = self.model.generate(ids, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        return output

    @property
    def chains(self) -> list[Chain]:
        """Of the sessions that are open."""
        return [chain for chain in self.model.blocks.swarm.sessions if chain.hops]

    @property
    def chain(self) -> Chain:
        (chain,) = self.chains
        return chain

    def server(self, hop: int) -> LocalServer:
        """Which computes this hop of the only session."""
        return self.fleet.find(self.chain.hops[hop].hop.server.peer_id)

    def kill(self, *hops: int) -> None:
        for server in [self.server(hop) for hop in hops]:
            server.kill()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """``listener`` hears of further events, on the thread of the network."""
        self._listeners.append(listener)

    @property
    def recoveries(self) -> list[Recovery]:
        return [event for event in self.events if isinstance(event, Recovery)]

    @property
    def moves(self) -> list[Move]:
        return [event for event in self.events if isinstance(event, Move)]

    @property
    def waits(self) -> list[Waiting]:
        return [event for event in self.events if isinstance(event, Waiting)]

    @property
    def moved_blocks(self) -> list[str]:
        """The blocks of each recovery."""
        return [str(recovery.span) for recovery in self.recoveries]

    def close(self) -> None:
        self.model.close()

    def _knows_all(self) -> bool:
        view = background.run(self.model.blocks.swarm.view(0))
        online = [server for server in view.servers if server.state is ServerState.ONLINE]
        known = {address for server in online for address in server.addresses}
        return all(server.ready["grpc"] in known for server in self.fleet.running)

    def _heard(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


class Moments:
    """Acts at chosen moments of this process's sessions, counted from the beginning of the test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._actions: dict[tuple[str, int], Action] = {}
        self._counts: Counter[str] = Counter()
        self._under_way: list[asyncio.Task] = []
        send, read_event = HopSession.send, HopSession._read_event

        def stepping(step: Callable) -> Callable:
            def stepped(session: RemoteSession, *args) -> Any:
                self._reach("step")
                return step(session, *args)

            return stepped

        async def sending(hop: HopSession, message: pb.Step, parts) -> None:
            await send(hop, message, parts)
            if message.number >= FIRST_STEP:
                self._reach("sent")

        async def reading(hop: HopSession):
            event = await read_event(hop)
            if isinstance(event, HopOutput) and not event.relay:
                self._reach("answered")
            return event

        for name in ("forward", "backward"):
            patch.setattr(ServerConnection, name, self._watched(name, getattr(ServerConnection, name)))
        for name in ("step", "step_through"):
            patch.setattr(RemoteSession, name, stepping(getattr(RemoteSession, name)))
        patch.setattr(HopSession, "send", sending)
        patch.setattr(HopSession, "_read_event", reading)

    def before_step(self, number: int, action: Action) -> None:
        """When a session is about to take its step: nothing is under way."""
        self._actions["step", number] = action

    def after_sending(self, number: int, action: Action) -> None:
        """As soon as the client has sent so many steps, of which a long prompt has several."""
        self._actions["sent", number] = action

    def after_answer(self, number: int, action: Action) -> None:
        """As soon as the client has got so many answers, without those that it is to pass on to the next server."""
        self._actions["answered", number] = action

    def after_hop(self, name: str, number: int, action: Action) -> None:
        """As soon as so many servers have answered a ``forward`` or ``backward`` of training."""
        self._actions[name, number] = action

    def _watched(self, name: str, method: Callable) -> Callable:
        async def watched(*args) -> object:
            result = await method(*args)
            self._reach(name)
            return result

        return watched

    def _reach(self, what: str) -> None:
        self._counts[what] += 1
        action = self._actions.pop((what, self._counts[what]), None)
        result = action and action()
        if asyncio.iscoroutine(result):
            self._under_way.append(asyncio.ensure_future(result))
