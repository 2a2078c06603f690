"""Checkpoints give back every bit; what is damaged is named; who is killed in the middle leaves the older ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.lr_scheduler import LRScheduler as Scheduler

from swarm_protocol.errors import CheckpointError
from swarm_training.checkpoints import checkpoint, store
from swarm_training.checkpoints.checkpoint import Checkpoint, parameters_digest, read, write
from swarm_training.checkpoints.flat_state import FlatState, flatten, load_optimizer, unflatten
from swarm_training.checkpoints.store import CheckpointDirectory, copy_to_hub
from swarm_training.checkpoints.whole_directory import CannotWrite


class Lamblike(torch.optim.Optimizer):
    """Keeps what optimizers of others keep: counters as numbers, 8-bit tensors, lists, and None."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, dict(lr=lr, betas=(0.9, 0.999), clip=None, adapt=True, kind="lamb"))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("quantised", torch.zeros(parameter.numel(), dtype=torch.uint8))
                state.setdefault("scales", [torch.ones(1), 0.1])
                state["step"] += 1
                state["quantised"] += 3
                state["scales"][0] *= 1.1
                state["ratio"] = float(parameter.norm()) / 3
                parameter -= group["lr"] * state["scales"][0] * parameter.grad / (1 + state["ratio"] + state["step"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    "adamw with groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "lr": 1e-3}], lr=0.1 + 0.2
    ),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, lr_decay=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=torch.tensor(0.01)),
    "lamb-like": lambda parameters: Lamblike(parameters, lr=0.01),
}


def trained(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer, Scheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = make(list(model.parameters()))
    scheduler = CosineAnnealingLR(optimizer, T_max=20) if not isinstance(optimizer, torch.optim.Rprop) else None
    train(model, optimizer, scheduler, 3)
    return model, optimizer, scheduler


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = trained(OPTIMIZERS[name])
    saved = Checkpoint(
        "run",
        3,
        model.state_dict(),
        optimizer.state_dict(),
        scheduler and scheduler.state_dict(),
        {"taken": 7},
        {"a": [1.5]},
    )
    write(saved, tmp_path / "one")
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    again = OPTIMIZERS[name](list(other.parameters()))
    found = read(tmp_path / "one")
    assert (found.run, found.step, found.data, found.config) == ("run", 3, {"taken": 7}, {"a": [1.5]})
    assert_equal(found.optimizer, optimizer.state_dict())
    other.load_state_dict(found.parameters)
    load_optimizer(again, found.optimizer)
    schedule = CosineAnnealingLR(again, T_max=20) if scheduler is not None else None
    if schedule is not None:
        schedule.load_state_dict(found.scheduler)
        load_optimizer(again, found.optimizer)  # a new scheduler has set its first rate
    for each in ((model, optimizer, scheduler), (other, again, schedule)):
        train(*each, 4)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(again.state_dict(), optimizer.state_dict())


def assert_equal(one: object, other: object) -> None:
    """Types too, and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def test_numbers_survive_json_exactly() -> None:
    state = {"a": [0.1 + 0.2, 1e-320, float("inf"), 2**70, True, None, "x"], 3: ((), [], {}), "": {"b": torch.ones(())}}
    flat = flatten(state)
    assert_equal(unflatten(FlatState(flat.tensors, json.loads(json.dumps(flat.structure)))), state)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(ValueError, match="the state has a function at 'groups/0/rule'"):
        flatten({"groups": [{"rule": lambda: 1}]})
    with pytest.raises(ValueError, match="a key at 'state' that is no string or whole number"):
        flatten({"state": {torch.ones(1): 1}})
    parameter = nn.Parameter(torch.ones(2))
    schedule = LambdaLR(torch.optim.SGD([parameter], lr=1.0), lambda step: 1.0)
    assert flatten(schedule.state_dict()).structure  # functions are left out by torch itself


@pytest.mark.parametrize("structure", [{"tensor": "b"}, {"tensor": 1}, {"dict": [["a"]]}, {"dict": {}}, {}, {"x": 1}])
def test_a_structure_of_somebody_else_is_refused(structure: object) -> None:
    with pytest.raises(CheckpointError, match="the state of the optimizer is damaged"):
        unflatten(FlatState({"a": torch.ones(1)}, [structure]))


def small(step: int = 3, value: float = 1.0) -> Checkpoint:
    tied = torch.full((3, 2), value)
    parameters = {"embedding": tied, "head": tied, "empty": torch.ones(0), "half": torch.ones(2).bfloat16()}
    return Checkpoint("run", step, parameters, {"state": {0: {"step": torch.tensor(1.0)}}})


def test_tied_weights_empty_ones_and_views_are_written(tmp_path: Path) -> None:
    content = small()
    transposed = Checkpoint("run", 3, {**content.parameters, "view": torch.arange(6).view(2, 3).T}, None)
    write(transposed, tmp_path / "one")
    assert_equal(dict(sorted(read(tmp_path / "one").parameters.items())), dict(sorted(transposed.parameters.items())))


def test_the_digest_is_of_every_bit() -> None:
    parameters = small().parameters
    digests = {parameters_digest(parameters)}
    for name, tensor in parameters.items():
        if tensor.numel():
            changed = tensor.clone()
            changed.view(-1)[0] += 1
            digests.add(parameters_digest({**parameters, name: changed}))
        digests.add(parameters_digest({**parameters, name: tensor.double()}))
        digests.add(parameters_digest({key if key != name else "other": each for key, each in parameters.items()}))
    digests.add(parameters_digest({**parameters, "half": torch.ones(1, 2).bfloat16()}))
    assert len(digests) == 1 + 3 + 4 + 4 + 1
    assert parameters_digest(dict(reversed(parameters.items()))) == parameters_digest(parameters)


def test_damage_is_named(tmp_path: Path) -> None:
    def damaged(name: str, change: Callable[[bytes], bytes]) -> Path:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        write(small(), directory)
        (directory / name).write_bytes(change((directory / name).read_bytes()))
        return directory

    def fact(key: str, value: object) -> Callable[[bytes], bytes]:
        return lambda data: json.dumps({**json.loads(data), key: value}).encode()

    flipped = lambda data: data[:-1] + bytes([data[-1] ^ 1])  # noqa: E731
    for name, change, reason in (
        (checkpoint.MODEL, flipped, "model.safetensors is damaged: the digest of its tensors is not"),
        (checkpoint.OPTIMIZER, flipped, "optimizer.safetensors is damaged: the digest of its tensors is not"),
        (checkpoint.MODEL, lambda data: data[:-1], "model.safetensors is truncated"),
        (checkpoint.FACTS, lambda data: data[:-9], "is no valid JSON"),
        (checkpoint.FACTS, fact("version", 2), "is of version 2: expected 1"),
        (checkpoint.FACTS, fact("step", -1), "has step=-1: expected a whole number of at least 0"),
        (checkpoint.FACTS, fact("run", 5), "has run=5: expected a string"),
        (checkpoint.FACTS, fact("data", []), r"has data=\[\]: expected an object"),
        (checkpoint.FACTS, fact("optimizer", {"tensor": "x"}), "the state of the optimizer is damaged"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read(damaged(name, change))
    (directory := damaged(checkpoint.MODEL, flipped)).joinpath(checkpoint.OPTIMIZER).unlink()
    (directory / checkpoint.MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        read(directory)


def test_the_newest_few_are_kept_and_those_that_were_undone_go(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "run", keep=2)
    assert checkpoints.steps() == []
    for step in (10, 20, 30):
        checkpoints.write(small(step, step))
    assert checkpoints.steps() == [20, 30]
    assert checkpoints.read(30).parameters["head"][0, 0] == 30
    checkpoints.write(small(30, 99.0))
    assert checkpoints.read(30).parameters["head"][0, 0] == 30
    with pytest.raises(CheckpointError, match="has no checkpoint of step 10: there are those of 20, 30"):
        checkpoints.read(10)
    checkpoints.discard_after(20)
    assert checkpoints.steps() == [20]


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "run")
    checkpoints.write(small(10)).rename(tmp_path / "elsewhere")
    checkpoints.path(10).symlink_to(tmp_path / "elsewhere")
    for discard in (lambda: checkpoints.discard_after(5), lambda: checkpoints.discard_undone(1, 0)):
        with pytest.raises(CannotWrite, match=r"step-000000010: Cannot call rmtree on a symbolic link"):
            discard()


def test_who_fails_while_writing_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    checkpoints.write(small(1))

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_save", full)
    with pytest.raises(ValueError, match=r"cannot write the checkpoint .*step-000000002: No space left on device"):
        checkpoints.write(small(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    for name, age_s in (("killed", 4000.0), ("at it", 10.0)):
        (tmp_path / f".partial-{name}").mkdir()
        os.utime(tmp_path / f".partial-{name}", (time.time() - age_s,) * 2)
    (tmp_path / "step-00000000x").mkdir()
    checkpoints = CheckpointDirectory(tmp_path)
    assert checkpoints.steps() == []
    checkpoints.write(small(1))
    assert [path.name for path in tmp_path.glob(".partial-*")] == [".partial-at it"] and checkpoints.steps() == [1]


class ErrorOfTheHubsOwn(Exception):
    """Of an HTTP library, say."""


def test_copies_on_the_hub_are_whole_and_can_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, there = small(), tmp_path / "there"
    upload = Mock(side_effect=lambda directory, *_: copytree(directory, there))
    monkeypatch.setattr(store, "upload_to_hub", upload)
    copy_to_hub("ada/run", CheckpointDirectory(tmp_path / "run").write(content), content)
    assert upload.call_args.args[1:] == ("ada/run", "run: step 3")
    assert_equal(dict(sorted(read(there).parameters.items())), dict(sorted(content.parameters.items())))
    for error in (ConnectionError, ErrorOfTheHubsOwn):
        upload.side_effect = error("no route to host\nand much more")
        with pytest.raises(CheckpointError, match=r"step 3 was not copied to ada/run on the hub: no route to host$"):
            copy_to_hub("ada/run", tmp_path / "run" / "step-000000003", content)


def test_the_hub_is_given_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of huggingface_hub exist with these arguments: `autospec` refuses others."""
    import huggingface_hub

    calls: list[object] = []
    import inspect

    def recorded(name: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(huggingface_hub.HfApi, name))
        return lambda *args, **options: calls.append((name, signature.bind(*args, **options).arguments))

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, recorded(name))
    store.upload_to_hub(tmp_path, "ada/run", "run: step 3")
    (created, facts), (uploaded, what) = calls
    assert (created, facts["repo_id"], facts["exist_ok"]) == ("create_repo", "ada/run", True)
    assert uploaded == "upload_folder"
    assert (what["repo_id"], what["folder_path"], what["commit_message"]) == ("ada/run", tmp_path, "run: step 3")
    assert "averaged/*" in what["delete_patterns"], "an average of an earlier checkpoint would stay"
