"""The state of a run as bytes and digest, for any optimizer; and what cannot be trained is refused with a sentence."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_models.checkpoints import safetensors_bytes
from swarm_protocol.errors import PeerUnavailable
from swarm_training import (
    Moment,
    RunOptions,
    TrainingConfig,
    TrainingRun,
)
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.config import RollbackPolicy
from swarm_training.numerics.reproducible import squared_norm
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.presence import PeerProcess
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer import receiving

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW([{"params": [each], "lr": 0.01 * i} for i, each in enumerate(p, 1)]),
}


def make(name: str, seed: int) -> tuple[TrainedState, torch.nn.Module]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    return TrainedState(model.parameters(), OPTIMIZERS[name](list(model.parameters()))), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_loads_the_state_steps_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).to(dtype) for _ in range(2)]
    first, second = (TrainedState(each.parameters(), OPTIMIZERS[name](list(each.parameters()))) for each in models)
    for _ in range(3):
        first.apply(torch.randn(first.length))
    second.apply(torch.randn(second.length))
    second.load(*first.snapshot())
    assert second.step == 3 and second.digest() == first.digest()
    for _ in range(3):
        gradient = torch.randn(first.length)
        first.apply(gradient)
        second.apply(gradient)
        assert first.digest() == second.digest()
    assert all(torch.equal(*pair) for pair in zip(first.parameters, second.parameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_gradient_is_clipped_as_torch_clips_it(max_norm: float, dtype: torch.dtype) -> None:
    _, model = make("SGD", 0)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    state = TrainedState(model.parameters(), optimizers[0], max_norm=max_norm)
    gradient = torch.randn(state.length, dtype=dtype)
    state.apply(gradient)
    for parameter, part in zip(other.parameters(), gradient.float().split([20, 4, 12, 3]), strict=True):
        parameter.grad = part.view(parameter.shape)
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm) > 0.5
    optimizers[1].step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-6, atol=1e-7)


def test_parts_of_a_model_are_clipped_as_the_whole_is_bit_for_bit() -> None:
    _, model = make("SGD", 0)
    parts = copy.deepcopy(model)
    whole = TrainedState(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1), max_norm=0.5)
    states = [
        TrainedState(each.parameters(), torch.optim.SGD(each.parameters(), lr=0.1), max_norm=0.5) for each in parts
    ]
    gradient = torch.randn(whole.length, dtype=torch.float64) * torch.logspace(-6, 0, whole.length, dtype=torch.float64)
    whole.apply(gradient)
    pieces = list(zip(states, gradient.split([each.length for each in states]), strict=True))
    norm = math.fsum(number for state, piece in pieces for number in state.squared_norm(piece))
    for state, piece in pieces:
        state.apply(piece, norm)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), parts.parameters(), strict=True))
    assert states[0].squared_norm(pieces[0][1], [(0, 20)]) == (squared_norm(pieces[0][1][20:]),)


def test_the_digest_sees_parameters_state_and_settings() -> None:
    state, model = make("Adam", 0)
    state.apply(torch.ones(state.length))
    digests = {state.digest()}
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    digests.add(state.digest())
    state._optimizer.state[next(model.parameters())]["exp_avg"][0, 0] += 1e-6
    digests.add(state.digest())
    state._optimizer.param_groups[0]["lr"] *= 2
    assert len(digests | {state.digest()}) == 4


@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: data[:-5], lambda data: b"\x80\x04pickle" + data])
def test_what_is_no_state_changes_nothing(spoil: Callable[[bytes], bytes]) -> None:
    state, _ = make("Adam", 0)
    before = state.digest()
    with pytest.raises(ValueError, match=r"the state (is no|does not fit|has other)"):
        state.load(Moment(0, 5), StateFile.of(spoil(content(make("Adam", 1)[0]))))
    assert state.digest() == before and state.step == 0


def content(state: TrainedState) -> bytes:
    return b"".join(state.snapshot()[1].parts())


def spoiled(data: bytes, spoil: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> bytes:
    """The state with its tensors, or the settings beside them, changed."""
    tensors, metadata = safetensors_bytes.from_bytes(data)
    plain = json.loads(metadata["optimizer"])
    spoil(tensors, plain)
    return safetensors_bytes.to_bytes(tensors, {"optimizer": json.dumps(plain)})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors, plain: plain.update(scalars=[1]),
        lambda tensors, plain: plain["scalars"].update({"1": 5}),
        lambda tensors, plain: plain["scalars"].update({"1": {"step": []}}),
        lambda tensors, plain: plain.update(groups=5),
        lambda tensors, plain: plain["groups"][0].update(eps={}),
        lambda tensors, plain: plain["groups"][0].update(lr="fast"),
        lambda tensors, plain: tensors.update({"state/1/exp_avg": torch.ones(3)}),
    ],
)
def test_a_state_that_no_optimizer_can_have_changes_nothing(spoil: Callable[..., object]) -> None:
    state, _ = make("Adam", 0)
    state._optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    state.apply(torch.ones(state.length))
    other = make("Adam", 1)[0]
    other.apply(torch.ones(other.length))
    before = state.digest()
    with pytest.raises(ValueError, match=r"the state (is no|does not fit|has other)"):
        state.load(Moment(0, 5), StateFile.of(spoiled(content(other), spoil)))
    assert state.digest() == before and state.step == 1


@pytest.mark.parametrize("optimizer", [None, [], {"state": {}}, {"state": {}, "param_groups": [None]}])
def test_a_checkpoint_without_a_state_for_this_optimizer_is_refused(optimizer: object) -> None:
    state, model = make("Adam", 0)
    before = state.digest()
    with pytest.raises(ValueError, match="the checkpoint is of another optimizer"):
        state.restart(Moment(0, 5), [each.detach() for each in model.parameters()], optimizer, {})
    assert state.digest() == before and state.step == 0


def parameters() -> list[torch.nn.Parameter]:
    return list(torch.nn.Linear(2, 2).parameters())


def run(given: list[torch.nn.Parameter], **options: object) -> TrainingRun:
    optimizer = torch.optim.SGD(given or parameters(), lr=0.1)
    return TrainingRun("toy", given, optimizer, **{"target_batch_size": 4, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"given": []}, "there are no parameters: expected model.parameters()"),
        ({"given": [torch.nn.Parameter(torch.ones(1), requires_grad=False)]}, "no parameter needs a gradient"),
        ({"target_batch_size": 0}, "target_batch_size is 0: expected at least 1"),
        ({"target_batch_size": -3}, "target_batch_size is -3: expected at least 1"),
        ({"initial_peers": "/ip4/1.2.3.4"}, "initial_peers is a text: expected a list"),
        ({"config": TrainingConfig(client_mode=True)}, "client_mode needs initial_peers"),
        ({"initial_peers": ["nonsense"]}, "is no multiaddr of a peer"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**{"given": parameters(), **arguments})


def test_options_come_from_an_object_or_from_keywords(tmp_path: Path) -> None:
    options = RunOptions(resume=tmp_path)
    for given in ({"options": options}, {"resume": tmp_path}, {"options": RunOptions(), "resume": tmp_path}):
        with pytest.raises(ValueError, match="resume and resumed_at: expected one of them"):
            run(parameters(), resumed_at=Moment(0, 1), **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'resumed'"):
        run(parameters(), resumed=tmp_path)


def test_parameters_outside_the_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="parameter 0 is not in the optimizer"):
        TrainingRun("toy", parameters(), torch.optim.SGD(parameters(), lr=0.1), target_batch_size=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"share": -1.0}, "share is"),
        ({"silence_s": 1.0}, "silence_s is"),
        ({"chunk_elements": 0}, "chunk_elements is"),
        ({"max_norm": -1.0}, "max_norm is"),
        ({"average_decay": 1.0}, "average_decay is"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1: expected at least 0 steps"),
        (
            {"checkpoint_every": 5, "rollback": RollbackPolicy(patience=10)},
            "checkpoints_kept is 2: expected at least 3",
        ),
        ({"aggregation": "median"}, "aggregation is 'median': expected one of mean, centered_clip"),
        ({"counting": "twice"}, "expected one of samples, exact"),
        ({"counting": "exact", "delay": True}, "no delay"),
        ({"counting": "exact", "aggregation": "centered_clip"}, "expected aggregation 'mean'"),
        ({"codec": "fp64"}, "expected counting 'exact'"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**wrong)


def test_a_run_clips_as_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def enter(*arguments: object) -> None:
        states.extend(each for each in arguments if isinstance(each, TrainedState))
        raise InterruptedError

    monkeypatch.setattr(PeerProcess, "enter", enter)
    with pytest.raises(InterruptedError):
        run(parameters(), config=TrainingConfig(max_norm=0.5, average_decay=0.75))
    assert states[0].average_decay == 0.75 and states[0].common["average_decay"] == "0.75"
    assert states[0].max_norm == 0.5 and states[0].common["max_norm"] == "0.5"
    assert (
        not {"max_norm", "average_decay"} & TrainingConfig().common.keys()
    )  # peers of older versions have no such setting


async def test_a_peer_that_fails_to_leave_closes_its_server_and_its_node() -> None:
    class Failing:
        async def leave(self) -> None:
            raise PeerUnavailable("the disk fails")

    closed: list[str] = []
    resources = AsyncExitStack()
    resources.callback(closed.append, "node")
    process = PeerProcess(Failing(), [], resources)  # type: ignore[arg-type]
    with pytest.raises(PeerUnavailable, match="the disk fails"):
        await process.leave()
    assert closed == ["node"]


class NeedsLoss(torch.optim.SGD):
    def step(self, loss: float) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("kind", "needed"), [(torch.optim.LBFGS, "LBFGS.step needs closure"), (NeedsLoss, "NeedsLoss.step needs loss")]
)
def test_optimizers_that_need_more_than_gradients_are_refused(kind: type[torch.optim.Optimizer], needed: str) -> None:
    given = parameters()
    with pytest.raises(ValueError, match=f"{needed}: expected an optimizer that steps with the gradients alone"):
        TrainingRun("toy", given, kind(given, lr=0.1), target_batch_size=4)  # type: ignore[call-arg]


def test_frozen_parameters_are_compared_bit_for_bit() -> None:
    def state(*frozen: torch.Tensor) -> TrainedState:
        trained = torch.nn.Parameter(torch.ones(2))
        given = [trained, *(torch.nn.Parameter(each, requires_grad=False) for each in frozen)]
        return TrainedState(given, torch.optim.SGD([trained], lr=0.1))

    base = torch.arange(4.0)
    assert state(base).model_digest == state(base.clone()).model_digest
    others = base + 1e-6 * (base == 3), base.bfloat16(), base.view(2, 2), torch.empty(4, device="meta")
    digests = {state(each).model_digest for each in (base, *others)} | {state().model_digest}
    assert len(digests) == 6
    with pytest.raises(ValueError, match=r"frozen parameters is [0-9a-f]{16} here and [0-9a-f]{16} in the run"):
        there = state(others[0])
        header = pb.StateHeader(parameters=there.shapes, optimizer=there.optimizer_name, common=there.common)
        receiving._require_same(header, state(base))


@pytest.mark.parametrize(("heartbeat_s", "straggler_s", "expected"), [(1, 5, 0.1), (480, 5, 2.5), (480, 900, 48)])
def test_a_meeting_is_looked_at_often_enough_for_its_deadlines(
    heartbeat_s: float, straggler_s: float, expected: float
) -> None:
    config = TrainingConfig(heartbeat_s=heartbeat_s, silence_s=1000, straggler_s=straggler_s)
    assert config.poll_s == expected
