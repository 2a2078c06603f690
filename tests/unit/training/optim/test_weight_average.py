"""The moving average of the weights: that of torch in one process, the same bits at all peers, in all checkpoints."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_models.checkpoints import safetensors_bytes
from swarm_protocol.errors import PeerUnavailable
from swarm_training.checkpoints.model_files import ServableModel
from swarm_training.compression.compressor import Plain
from swarm_training.core.moment import Moment
from swarm_training.optim.by_name import optimizer_by_name
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.optim.weight_average import average_of
from swarm_training.run.saving import load_newest, save_servable
from swarm_training.run.state import TrainedState, digest_of
from swarm_training.runfile.settings import OPTIMIZERS
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done
from tests.zoo import make_config

pytestmark = IN_VIRTUAL_TIME

DECAY = 0.9


def averaging(model: torch.nn.Module, name: str = "adamw", decay: float = DECAY, drifts: bool = False) -> TrainedState:
    optimizer = optimizer_by_name(name, model.parameters(), lr=0.1)
    return TrainedState(model.parameters(), optimizer, Plain(), drifts=drifts, average_decay=decay)


def train(state: TrainedState, steps: int) -> None:
    for _ in range(steps):
        state.apply(torch.randn(state.length, generator=torch.Generator().manual_seed(state.step)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_average_of_torch_in_one_process(name: str) -> None:
    models = [torch.nn.Linear(70, 60), torch.nn.Linear(70, 60)]  # so large that 8-bit states are used
    models[1].load_state_dict(models[0].state_dict())
    state, optimizer = averaging(models[0], name), optimizer_by_name(name, models[1].parameters(), lr=0.1)
    reference = AveragedModel(models[1], multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(5):
        gradient = torch.randn(state.length, generator=torch.Generator().manual_seed(step))
        for parameter, part in zip(models[1].parameters(), gradient.split([4200, 60]), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        optimizer.step()
        reference.update_parameters(models[1])
    train(state, 5)
    with state.averaged():
        for own, expected, plain in zip(
            models[0].parameters(), reference.parameters(), models[1].parameters(), strict=True
        ):
            torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)
            assert not torch.allclose(own, plain, rtol=1e-3)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_joiners_get_the_shared_parameters_while_the_model_has_the_averages() -> None:
    model = torch.nn.Linear(2, 2)
    state = averaging(model)
    train(state, 3)
    digest = state.digest()
    with state.averaged():
        weight = model.weight.detach().clone()
        for waits in (True, False):
            assert digest_of(state.snapshot(waits)[1]) == state.digest() == digest
        with state.averaged():
            assert state.digest() == digest and torch.equal(model.weight, weight)
    assert state.digest() == digest and not torch.equal(model.weight, weight)


@pytest.mark.parametrize("drifts", [False, True])
def test_the_shared_parameters_can_be_had_while_the_model_has_the_averages(drifts: bool) -> None:
    model, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    reference.load_state_dict(model.state_dict())
    state, plain = (averaging(each, drifts=drifts) for each in (model, reference))
    for each in (state, plain):
        train(each, 3)
    with state.averaged():
        average = model.weight.detach().clone()
        with state.restored():
            assert torch.equal(model.weight, reference.weight)
        assert torch.equal(model.weight, average) and not torch.equal(average, reference.weight)
        with state.averaged(), state.restored():
            assert torch.equal(model.weight, reference.weight)
    for each in (state, plain):
        train(each, 2)
    assert torch.equal(model.weight, reference.weight) and state.digest() == plain.digest()


@pytest.mark.parametrize("enters", [True, False], ids=["begins", "ends"])
def test_a_state_is_not_given_if_the_model_gets_its_averages_while_the_state_is_written(
    enters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = averaging(torch.nn.Linear(2, 2))
    train(state, 3)
    write = safetensors_bytes.write
    with ExitStack() as stack:
        if not enters:
            stack.enter_context(state.averaged())

        def interrupted(*arguments: Any) -> None:
            stack.enter_context(state.averaged()) if enters else stack.close()
            write(*arguments)

        monkeypatch.setattr(safetensors_bytes, "write", interrupted)
        with pytest.raises(PeerUnavailable, match="ask again"):
            state.snapshot(waits=False)


def test_halves_are_narrower_than_their_average() -> None:
    """In bfloat16, a step of 1 − 0.999 of the way would be rounded away."""
    model = torch.nn.Linear(2, 2, bias=False).bfloat16()
    state = averaging(model, "sgd", decay=0.999)
    train(state, 1)
    first = model.weight.detach().float().clone()
    train(state, 1)
    average = average_of(state._optimizer, model.weight)
    assert average is not None and average.dtype == torch.float32
    torch.testing.assert_close(average, first + 0.001 * (model.weight.detach().float() - first), rtol=1e-6, atol=0)


@pytest.mark.parametrize("has_local_steps", [False, True])
async def test_all_peers_have_the_same_bits_also_those_that_join(has_local_steps: bool) -> None:
    def local(parameter: torch.nn.Parameter) -> LocalSteps | None:
        return LocalSteps(torch.optim.SGD([parameter], lr=0.1)) if has_local_steps else None

    world = World()
    options: dict[str, Any] = dict(target=40, config=replace(CONFIG, average_decay=DECAY), local=local)
    peers = [SimulatedPeer.make(world, 0, **options)]
    await peers[0].enter()
    for number in (1, 2):
        peers.append(SimulatedPeer.make(world, number, **options))
        await peers[number].enter()
    await all_done([peer.spawn(peer.train(0.5, 5, until_step=4)) for peer in peers])
    peers.append(SimulatedPeer.make(world, 3, **options))
    await peers[3].enter()
    await all_done([peer.spawn(peer.train(0.5, 5, until_step=8)) for peer in peers])
    await asyncio.sleep(1.0)
    truth = torch.nn.Linear(1, 37, bias=False)
    reference = AveragedModel(truth, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, 9):
        truth.weight.data = peers[0].history[step][:, None].clone()
        reference.update_parameters(truth)
    for peer in peers:
        assert peer.state.moment == Moment(0, 8) and peer.state.digest() == peers[0].state.digest()
        with peer.state.averaged():
            torch.testing.assert_close(peer.parameter[:, None], reference.module.weight, rtol=1e-5, atol=1e-6)


def saved(model: PreTrainedModel, state: TrainedState, directory: Path) -> Path:
    servable = ServableModel(model, averaged=state.averaged_tensors(model))
    return save_servable(state.checkpoint("toy", model), servable, 0, directory, keep=3)


def test_a_checkpoint_has_it_as_a_second_model_and_the_run_goes_on_with_it(tmp_path: Path) -> None:
    def model() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(make_config("gpt2")).eval()

    one, other, without = model(), model(), model()
    state = averaging(one)
    assert state.averaged_tensors(one) is None
    train(state, 3)
    path, tokens = saved(one, state, tmp_path), torch.arange(6)[None]
    served = AutoModelForCausalLM.from_pretrained(path / "averaged")
    present = one(tokens).logits
    with state.averaged():
        assert torch.equal(served(tokens).logits, one(tokens).logits) and not torch.equal(
            served(tokens).logits, present
        )
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(tokens).logits, present)
    assert not [name for name in load_file(path / "training" / "state.safetensors") if "average" in name]
    again = averaging(other)
    assert load_newest(again, tmp_path) == Moment(0, 3) and again.digest() == state.digest()
    train(again, 2)
    train(state, 2)
    assert again.digest() == state.digest()
    plain = averaging(without, decay=0.0)
    load_newest(plain, tmp_path)
    train(plain, 2)
    assert all(torch.equal(*pair) for pair in zip(without.parameters(), one.parameters(), strict=True))
    assert plain.averaged_tensors(without) is None  # the average of the earlier run is gone
    with pytest.raises(ValueError, match="the run has no average of its weights"), plain.averaged():
        pass
