"""The moving average of the weights of all stages: that of torch over the whole model in one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from swarm_training.core.moment import Moment
from swarm_training.optim.weight_average import average_of
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.stages.peer.test_simulated_stages import start
from tests.worlds.stages import CONFIG, StageWorld, ToyStage, ToyTrainer, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES, STEPS, DECAY = 3, 4, 6, 0.9


def averages_in_one_process() -> list[list[torch.Tensor]]:
    """By stage, the averages after so many steps."""
    model = nn.ModuleList(ToyStage(index, STAGES, tied=True).layer for index in range(STAGES))
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for stages in single(STAGES, MICRO_BATCHES, STEPS, tied=True)[1:]:
        for layer, parameters in zip(model, stages, strict=True):
            layer.load_state_dict(dict(zip([name for name, _ in layer.named_parameters()], parameters, strict=True)))
        reference.update_parameters(model)
    return [list(layer.parameters()) for layer in reference.module]


async def test_it_is_that_of_torch_over_the_whole_model_after_a_stage_was_lost_too() -> None:
    """Weights that two stages have are averaged as one."""
    world = StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, average_decay=DECAY), tied=True)
    await start(world, per_stage=1)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(3)
    world.kill(world.alive(1)[0].peer_id)  # who comes next goes on from a checkpoint, with its average
    world.join(1)
    await world.reach(STEPS)
    training.cancel()
    expected = averages_in_one_process()
    for peer in world.alive():
        assert peer.state.moment == Moment(1, STEPS)
        optimizer = peer.state._optimizer
        for parameter, average in zip(peer.stage.parameters, expected[peer.stage_peer.index], strict=True):
            found = average_of(optimizer, parameter)
            assert found is not None and torch.allclose(found, average, rtol=1e-5, atol=1e-7)
            assert not torch.allclose(found, parameter, rtol=1e-4)
