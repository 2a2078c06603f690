"""``TrainingRun.save`` and ``resume``: what is trained after a restart is what would have been trained without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_protocol.errors import CheckpointError
from swarm_training import TrainingConfig, TrainingRun
from swarm_training.checkpoints.model_files import ServableModel
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.core.moment import Moment
from swarm_training.run import saving
from swarm_training.run.saving import save, save_servable
from swarm_training.run.state import TrainedState
from tests.marks import SLOW
from tests.zoo import make_config

SHAPES = [(4, 3), (4,)]


def made(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[TrainedState, PowerSGD]:
    torch.manual_seed(0)
    layer, compressor = torch.nn.Linear(3, 4), PowerSGD(SHAPES, rank=1)
    return TrainedState(layer.parameters(), optimizer(layer.parameters(), lr=0.1), compressor), compressor


def load_newest(state: TrainedState, directory: Path) -> Moment | None:
    return saving.load_newest(state, directory)


def train(state: TrainedState, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        state.apply(torch.randn(state.length, generator=generator))


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (truth, _), (stopped, compressor), (again, loaded) = made(), made(), made()
    train(truth, 7)
    train(stopped, 4)
    for tensor in compressor.state_dict().values():
        tensor.add_(1.0)
    path = save(stopped, 0, tmp_path / "new", keep=3)
    assert [path] == list((tmp_path / "new").iterdir())
    assert load_newest(again, tmp_path / "new") == again.moment == Moment(0, 4)
    assert all(map(torch.equal, loaded.state_dict().values(), compressor.state_dict().values()))
    train(again, 3)
    assert all(map(torch.equal, again.parameters, truth.parameters))


def test_the_checkpoint_of_a_spared_step_stays_beside_the_newest(tmp_path: Path) -> None:
    state, paths = made()[0], []
    for _ in range(5):
        train(state, 1)
        paths.append(save(state, 0, tmp_path, keep=2, spared={2}))
    assert set(tmp_path.iterdir()) == {paths[1], *paths[-2:]}
    train(state, 1)
    newest = save(state, 0, tmp_path, keep=2, spared={4})
    assert set(tmp_path.iterdir()) == {*paths[-2:], newest}


def tamper(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize("harm", [tamper, lambda path: path.write_bytes(b"")])
def test_the_newest_that_is_intact_is_loaded(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, paths = made()[0], []
    for _ in range(4):
        train(state, 1)
        paths.append(save(state, 0, tmp_path, keep=3))
    assert set(tmp_path.iterdir()) == set(paths[1:])
    harm(paths[-1])
    with caplog.at_level(logging.WARNING):
        assert load_newest(made()[0], tmp_path) == Moment(0, 3)
    assert [f"the checkpoint {paths[-1]} is damaged, and is not used"] == caplog.messages
    for path in paths[1:]:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no checkpoint that is intact: expected another one"):
        load_newest(made()[0], tmp_path)


def test_what_a_rollback_has_undone_is_not_loaded(tmp_path: Path) -> None:
    state, _ = made()
    train(state, 2)
    save(state, 0, tmp_path, keep=5)
    train(state, 2)
    undone = save(state, 0, tmp_path, keep=5)
    load_newest(state, tmp_path)
    state.go_to(Moment(1, 2), None)
    train(state, 1)
    save(state, 2, tmp_path, keep=5)
    assert not undone.exists() and load_newest(made()[0], tmp_path) == Moment(1, 3)
    train(state, 3)
    assert load_newest(state, tmp_path) == Moment(1, 3)


def tiny_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(make_config("llama"))


def made_of(model: PreTrainedModel) -> tuple[TrainedState, PowerSGD]:
    """The order of the parameters is not that of the model, and one of them is frozen."""
    model.get_input_embeddings().weight.requires_grad_(False)
    parameters = [each for each in reversed(list(model.parameters())) if each.requires_grad]
    compressor = PowerSGD([each.shape for each in parameters], rank=1)
    return TrainedState(parameters, torch.optim.AdamW(parameters, lr=0.1), compressor), compressor


def test_a_folder_that_servers_load_gives_back_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, directory = tiny_model(), tmp_path / "run"
    state, compressor = made_of(model)
    paths = []
    for step in range(1, 5):
        train(state, 1)
        for tensor in compressor.state_dict().values():
            tensor.add_(1.0)
        paths.append(save_servable(state.checkpoint("toy", model), ServableModel(model), 0, directory, keep=3))
        if step == 3:
            digest = state.digest()
    assert sorted(directory.iterdir()) == paths[1:]
    tokens = torch.arange(6)[None]
    served = AutoModelForCausalLM.from_pretrained(paths[-1])
    assert torch.equal(served(tokens).logits, model.eval()(tokens).logits)
    again, _ = made_of(tiny_model())
    assert load_newest(again, directory) == Moment(0, 4) and again.digest() == state.digest()
    tamper(paths[-1] / "model.safetensors")
    save(made()[0], 0, directory, keep=3)  # an older file beside them
    again, _ = made_of(tiny_model())
    with caplog.at_level(logging.WARNING):
        assert load_newest(again, directory) == Moment(0, 3) and again.digest() == digest
    assert "is damaged" in caplog.messages[0] and caplog.messages[0].endswith("; it is not used")
    with pytest.raises(ValueError, match="is of another model or optimizer"):
        load_newest(made()[0], directory)
    with pytest.raises(ValueError, match="parameter 0 of the run is not in the model"):
        state.checkpoint("toy", tiny_model())


@SLOW
def test_a_run_saves_its_model_and_goes_on_from_it(tmp_path: Path) -> None:
    model, again = tiny_model(), tiny_model()

    def opened(model: PreTrainedModel) -> TrainingRun:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = TrainingConfig(average_decay=0.5)
        return TrainingRun("toy", model.parameters(), optimizer, target_batch_size=1, config=config, resume=tmp_path)

    tokens = torch.arange(6)[None]
    with opened(model) as run:
        for _ in range(2):
            model(tokens, labels=tokens).loss.backward()
            run.step(samples=1)
        with run.averaged():  # the run's parameters are saved, whatever the model has
            assert run.save(tmp_path, model=model) == tmp_path / "step-000000002"
        with pytest.raises(ValueError, match="model is a Linear: expected a PreTrainedModel of transformers"):
            run.save(tmp_path, model=torch.nn.Linear(1, 1))
    with opened(again) as run:
        assert run.num_steps == 2 and torch.equal(again(tokens).logits, model(tokens).logits)


def test_folders_of_steps_that_were_undone_go(tmp_path: Path) -> None:
    model = tiny_model()
    state, _ = made_of(model)
    for step in (2, 4):
        state.go_to(Moment(0, step), None)
        save_servable(state.checkpoint("toy", model), ServableModel(model), 0, tmp_path, keep=9)
    state.go_to(Moment(1, 3), None)
    save_servable(state.checkpoint("toy", model), ServableModel(model), 2, tmp_path, keep=9)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000002", "step-000000003"]
    assert load_newest(made_of(tiny_model())[0], tmp_path) == Moment(1, 3)


def test_mistakes_are_told(tmp_path: Path) -> None:
    state, _ = made()
    assert load_newest(state, tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="keep is 0: expected at least 1 checkpoint"):
        save(state, 0, tmp_path, keep=0)
    save(state, 0, tmp_path, keep=1)
    other = torch.nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(other.parameters())
    for options, message in (
        ({}, "is of another model or optimizer: expected another directory"),
        ({"resumed_at": Moment(0, 1)}, "resume and resumed_at: expected one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingRun("toy", other.parameters(), optimizer, target_batch_size=1, resume=tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"checkpoints is .*file: "):
        save(state, 0, tmp_path / "file", keep=1)
