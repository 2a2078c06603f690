"""An expert beside plain torch, and on disk."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from swarm_protocol.errors import RequestRejected
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.server.registry import build, register_expert
from swarm_training.experts.server.storage import ExpertFiles

HIDDEN = 5


def expert(learning_rate: float = 0.1, max_grad_norm: float = 0.5) -> Expert:
    torch.manual_seed(0)
    return Expert(build("feedforward", HIDDEN), learning_rate, max_grad_norm)


def some(seed: int) -> torch.Tensor:
    return torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_backward_gives_the_gradient_and_steps_as_adam_with_clipping_does() -> None:
    own, module = expert(), copy.deepcopy(expert().module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for step in range(3):
        inputs = some(step).requires_grad_()
        optimizer.zero_grad()
        module(inputs).backward(some(10 + step))
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        grad = own.backward(some(step), some(10 + step))
        torch.testing.assert_close(grad, inputs.grad)
        optimizer.step()
    torch.testing.assert_close(own.forward(some(5)), module(some(5)).detach())
    assert own.num_steps == 3


def test_gradients_that_overflow_change_nothing() -> None:
    own = expert()
    before = own.state()
    with pytest.raises(RequestRejected, match="gradients of the expert are not finite"):
        own.backward(some(0), torch.full((7, HIDDEN), 3e38))
    after = own.state()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    own.backward(some(0), some(1))  # nothing of it was left behind
    other = expert()
    other.backward(some(0), some(1))
    torch.testing.assert_close(own.forward(some(2)), other.forward(some(2)))


def test_who_is_saved_and_loaded_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    own, files = expert(), ExpertFiles(tmp_path / "experts", "demo")
    assert files.cells() == []
    own.backward(some(0), some(1))
    files.write((3, 7), own.state())
    files.move((3, 7), (12, 0))
    (files.directory / "other.3.7.safetensors").write_bytes(b"")
    assert files.cells() == [(12, 0)]
    loaded = Expert(build("feedforward", HIDDEN), 0.1, 0.5)
    loaded.load(files.read((12, 0)))
    for each in (own, loaded):
        each.backward(some(2), some(3))
    assert all(torch.equal(tensor, loaded.state()[name]) for name, tensor in own.state().items())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files = ExpertFiles(tmp_path, "demo")
    files.write((1,), expert().state())
    with pytest.raises(ValueError, match="another kind of expert, or of another size"):
        Expert(build("linear", HIDDEN), 0.1, 0.5).load(files.read((1,)))
    (tmp_path / "demo.1.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cannot read .*demo\.1\.safetensors"):
        files.read((1,))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot keep experts in"):
        ExpertFiles(tmp_path / "file", "demo").cells()


def test_users_register_experts_of_their_own() -> None:
    register_expert("doubling", lambda hidden: _Doubling())
    own = Expert(build("doubling", HIDDEN), 0.1, 0.5)
    torch.testing.assert_close(own.forward(some(0)), 2 * some(0))
    torch.testing.assert_close(own.backward(some(0), some(1)), 2 * some(1))  # it has nothing to train
    with pytest.raises(ValueError, match="known already"):
        register_expert("doubling", lambda hidden: _Doubling())
    with pytest.raises(ValueError, match="'none' are not known: expected one of doubling, feedforward, linear"):
        build("none", HIDDEN)
    register_expert("narrowing", lambda hidden: nn.Linear(hidden, hidden - 1))
    with pytest.raises(ValueError, match="do not map float32 rows of 5 to such rows"):
        build("narrowing", HIDDEN)


class _Doubling(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_steps": torch.tensor(-1)}, "its number of steps is wrong: expected 2"),
        ({"num_steps": torch.tensor([2])}, "its number of steps is wrong"),
        ({"num_steps": torch.tensor(3)}, "its number of steps is wrong: expected 2"),
        ({"module.1.bias": torch.full((4 * HIDDEN,), torch.nan)}, "not finite"),
        ({"module.1.bias": torch.zeros(3)}, "another kind of expert, or of another size"),
        ({"module.1.bias": torch.zeros(4 * HIDDEN, dtype=torch.float64)}, "another kind of expert"),
        ({"module.1.bias": None}, "another kind of expert"),
        ({"optimizer.0.exp_avg": None}, "the state of its optimizer is not whole"),
        ({"optimizer.0.exp_avg": torch.zeros(3)}, "optimizer is that of another kind"),
        ({"optimizer.0.exp_avg_sq": torch.full((HIDDEN,), -1.0)}, "optimizer is that of another kind"),
        ({"optimizer.99.exp_avg": torch.zeros(3)}, "optimizer is that of another kind"),
        ({"optimizer.x.exp_avg": torch.zeros(3)}, "optimizer is that of another kind"),
        ({"optimizer.0.other": torch.zeros(HIDDEN)}, "optimizer is that of another kind"),
        ({"more": torch.zeros(3)}, "optimizer is that of another kind"),
    ],
)
def test_a_state_that_is_wrong_changes_nothing(changed: dict[str, torch.Tensor | None], message: str) -> None:
    trained, own = expert(), expert()
    for step in range(2):
        trained.backward(some(step), some(10 + step))
    own.backward(some(20), some(30))
    before, steps = own.state(), own.num_steps
    state = {name: each for name, each in (trained.state() | changed).items() if each is not None}
    with pytest.raises(ValueError, match=message):
        own.load(state, 2)
    assert own.num_steps == steps
    assert all(torch.equal(tensor, own.state()[name]) for name, tensor in before.items())
    own.load(trained.state(), 2)
    assert own.num_steps == 2


def test_files_of_before_there_were_versions_are_loaded() -> None:
    trained, own = expert(), expert()
    trained.backward(some(0), some(1))
    own.load({name: tensor for name, tensor in trained.state().items() if name != "num_steps"})
    assert own.num_steps == 0 and torch.equal(own.forward(some(2)), trained.forward(some(2)))


def test_no_state_is_larger_than_is_taken_from_others() -> None:
    trained = expert()
    trained.backward(some(0), some(1))
    assert len(safetensors.torch.save(trained.state())) <= trained.most_bytes
