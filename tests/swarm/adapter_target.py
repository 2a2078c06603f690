"""A server that has loaded an adapter of PEFT's, and is sent others; what plain PEFT computes beside it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter
from swarm_protocol.wire.codec import Assembler
from swarm_protocol.wire.constants import PART_BYTES, WIRE_VERSION
from tests.adapted import LocalModel
from tests.swarm.harness import InProcessServers
from tests.swarm.raw_client import Answer, RawClient
from tests.swarm.target import wire
from tests.zoo import save_checkpoint

HOSTED = Span(1, 5)
OK = grpc.StatusCode.OK


@dataclass
class Target:
    """A server, and the local model with an adapter of PEFT's, which the server has loaded too, as ``poet``."""

    client: RawClient
    local: LocalModel

    def forward(self, hidden: torch.Tensor, adapter: pb.AdapterName | None = None, **fields) -> pb.Forward:
        return pb.Forward(contract=self.contract(), hidden=wire(hidden), adapter=adapter, **fields)

    def contract(self) -> pb.Contract:
        record: ServerRecord = self.client.record
        blocks = pb.Span(start=HOSTED.start, end=HOSTED.end)
        return pb.Contract(wire_version=WIRE_VERSION, model=record.model, revision=record.revision, blocks=blocks)

    def adapter(self) -> Adapter:
        """Another one of each client: nobody else knows its salt."""
        return self.local.adapter(HOSTED, salt=secrets.token_bytes(16))

    def put(self, adapter: Adapter, part_bytes: int = PART_BYTES) -> pb.AdapterName:
        data, key = adapter.serialize()
        answer = self.client.put_adapter(*parts(data, part_bytes))
        assert (answer.status, [reply.key for reply in answer.replies]) == (OK, [key]), answer
        return pb.AdapterName(key=key)

    def output(self, hidden: torch.Tensor, adapter: pb.AdapterName | None = None, **fields) -> torch.Tensor:
        answer = self.client.forward(pb.ForwardRequest(forward=self.forward(hidden, adapter, **fields)))
        assert answer.status is OK, answer
        (output,) = tensors(answer)
        return output

    def kept_output(
        self, key: bytes, hidden: torch.Tensor, adapter: pb.AdapterName | None = None, **fields
    ) -> tuple[torch.Tensor, bool]:
        """Of a pass that the server is asked to keep, and whether it says that it does."""
        forward = self.forward(hidden, adapter, keep_key=key, **fields)
        answer = self.client.forward(pb.ForwardRequest(forward=forward))
        assert answer.status is OK, answer
        (output,) = tensors(answer)
        return output, answer.replies[0].kept

    def go_back(self, key: bytes, grad: torch.Tensor) -> Answer:
        """Through a pass that was kept."""
        kept = pb.KeptForward(contract=self.contract(), key=key)
        return self.client.backward(pb.BackwardRequest(kept=kept), pb.BackwardRequest(grad=wire(grad)))

    def gradients(
        self, hidden: torch.Tensor, grad: torch.Tensor, adapter: pb.AdapterName | None = None, **fields
    ) -> list[torch.Tensor]:
        answer = self.client.backward(
            pb.BackwardRequest(forward=self.forward(hidden, adapter, **fields)), pb.BackwardRequest(grad=wire(grad))
        )
        assert answer.status is OK, answer
        return tensors(answer)


def parts(data: bytes, part_bytes: int = PART_BYTES) -> list[pb.PutAdapterRequest]:
    return [pb.PutAdapterRequest(part=data[i : i + part_bytes]) for i in range(0, len(data), part_bytes)]


def tensors(answer: Answer) -> list[torch.Tensor]:
    """Each begins with an ``output``, and has further parts."""
    arriving: list[Assembler] = []
    for reply in answer.replies:
        if reply.WhichOneof("kind") == "output":
            assert not arriving or arriving[-1].complete
            arriving.append(Assembler(reply.output))
        else:
            arriving[-1].add(reply.more)
    return [assembler.tensor() for assembler in arriving]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def adapter_target(directory: Path, **options: Any) -> Iterator[Target]:
    """The adapter is saved as ``directory / "poet"``. ``options``: of the server."""
    save_checkpoint("llama", directory / "model")
    local = LocalModel.load(directory / "model", r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    local.peft.save_pretrained(directory / "poet")
    with InProcessServers(directory / "model", memory_dht=True) as servers:
        servers.start(str(HOSTED), **options)
        (record,) = servers.records()
        with RawClient(record) as client:
            yield Target(client, local)
