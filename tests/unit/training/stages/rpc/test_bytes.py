"""What a micro-batch costs on the wire, as a stage peer counts it, is what the formula says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))

from link_cost import LinkCost

from swarm_protocol.net.shares import HalfShares
from swarm_protocol.net.tls import ClientCredentials
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import BoundarySettings, Scratch, StageOptions
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.client import MicroBatch, StageRequest, StagesClient, WireForms
from swarm_training.stages.rpc.service import StagesService
from tests import zoo
from tests.worlds.identities import identity
from tests.worlds.toy_stages import RUN, START, ToyHost, serving

HIDDEN, ROWS, POSITIONS, TIMEOUT_S = 128, 2, 8, 30.0  # int8's blocks of 64 elements are full


class CountingShares(HalfShares):
    received_bytes = 0

    def add(self, caller: str, amount: int) -> None:
        super().add(caller, amount)
        self.received_bytes += max(0, amount)


class CountingService(StagesService):
    sent_bytes = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.room._bytes = self.received = CountingShares(self._limits.max_bytes)

    async def _compute(self, *arguments: Any) -> list[pb.ComputeReply]:
        replies = await super()._compute(*arguments)
        self.sent_bytes += sum(reply.tensor.size_bytes for reply in replies)
        return replies


@pytest.mark.parametrize("layers", ["none", "bottleneck:2", "maxout:2"])
@pytest.mark.parametrize("forms", [("fp32", "fp32"), ("int8", "bf16")])
async def test_a_middle_stage_costs_what_the_formula_says(layers: str, forms: tuple[str, str]) -> None:
    config = zoo.make_config("llama", num_hidden_layers=3, hidden_size=HIDDEN)
    stage = build_stage(Scratch(config), 1, 3, StageOptions(boundaries=BoundarySettings(layers)))
    inputs = torch.randn(ROWS, POSITIONS, stage.width, generator=torch.Generator().manual_seed(0))
    which = MicroBatch(1, START, 0)
    host: Any = ToyHost(stage)  # type: ignore[arg-type]
    async with serving(host, make=CountingService) as (peer, service):
        network = GrpcNetwork(ClientCredentials(identity(9)))
        client = StagesClient(network, RUN, WireForms(*forms))
        hidden = (await client.ask(StageRequest(which, inputs), peer, TIMEOUT_S)).tensor
        assert hidden is not None and hidden.shape == inputs.shape
        asked = StageRequest(which, inputs, grad=hidden, accumulates=True, wants_grad=True, is_backward=True)
        await client.ask(asked, peer, TIMEOUT_S)
        await network.close()
        cost, tokens = LinkCost.of(layers, HIDDEN, *forms), ROWS * POSITIONS
        assert service.received.received_bytes == tokens * cost.received_bytes
        assert service.sent_bytes == tokens * cost.sent_bytes
