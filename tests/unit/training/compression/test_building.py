"""From settings to what compresses: names and defaults agree, and peers that have the same settings step alike."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm_training.compression.codecs import CODEC_NAMES, codec_of
from swarm_training.compression.compressor import Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.compression.settings import CODECS, AveragingSettings
from swarm_training.core.config import TrainingConfig
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import SimulatedPeer, World, all_done

pytestmark = IN_VIRTUAL_TIME

SHAPE = (24, 16)


def test_the_settings_have_the_codecs_that_there_are() -> None:
    assert (*CODECS, "fp64") == CODEC_NAMES and AveragingSettings().codec == TrainingConfig().codec


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (AveragingSettings("fp16"), 1e-3),
        (AveragingSettings("int8", error_feedback=True), 2e-2),
        (AveragingSettings("fp16", power_sgd_rank=3), 1e-2),
    ],
)
async def test_peers_with_these_settings_take_the_step_of_the_weighted_mean(
    settings: AveragingSettings, tolerance: float
) -> None:
    """Gradients of rank 1 and their sums of rank 2 lose nothing to a rank of 3."""
    generator = torch.Generator().manual_seed(1)
    gradients = [
        torch.outer(torch.randn(24, generator=generator), torch.randn(16, generator=generator)) for _ in range(2)
    ]
    world, rank = World(), settings.power_sgd_rank
    peers = []
    for number in range(2):
        peer = SimulatedPeer.make(
            world,
            number,
            target=8,
            shape=SHAPE,
            config=TrainingConfig(codec=settings.codec, chunk_elements=64, join_timeout_s=30.0),
            compressor=lambda _number: PowerSGD([SHAPE], rank, "toy") if rank else Plain(),
            encoder=ErrorFeedback(codec_of(settings.codec)) if settings.error_feedback else None,
            optimizer=torch.optim.SGD,
        )
        peers.append(peer)
        await peer.enter()
    before = peers[0].parameter.detach().clone()
    await peers[0].step(gradients[0], 6)
    await asyncio.sleep(2.0)  # virtual: progress spreads
    meeting = peers[1].spawn(peers[1].step(gradients[1], 2))
    await asyncio.sleep(0.5)
    await all_done([meeting, peers[0].spawn(peers[0].drive(peers[0].share.report()))])
    assert [peer.state.step for peer in peers] == [1, 1]
    assert torch.equal(peers[0].parameter, peers[1].parameter)
    expected = (6 * gradients[0] + 2 * gradients[1]) / 8
    taken = (before - peers[0].parameter.detach()) / 0.1
    assert torch.allclose(taken, expected, atol=tolerance * float(expected.abs().max()))
