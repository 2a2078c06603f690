"""The layer beside a local mixture with the same weights, and what it does when experts fail."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from swarm_protocol.errors import PeerUnavailable, TrainingDiverged
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.core.config import MixtureConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.mixture.mixture import RemoteMixtureOfExperts
from swarm_training.experts.server.registry import build
from tests.worlds.experts import LocalNetwork

HIDDEN, GRID, ROWS = 6, (3, 4), 24
SHORT = MixtureConfig(timeout_s=0.2, backward_timeout_s=0.2, ban_s=600.0)


def experts_at(cells: list[Cell], learning_rate: float = 0.0, kind: str = "feedforward") -> dict[Cell, Expert]:
    torch.manual_seed(1)
    return {cell: Expert(build(kind, HIDDEN), learning_rate, max_grad_norm=1.0) for cell in cells}


ALL_CELLS = list(itertools.product(range(3), range(4)))


def make(
    network: LocalNetwork, k: int = 3, config: MixtureConfig | None = None, grid: tuple[int, ...] = GRID
) -> RemoteMixtureOfExperts:
    torch.manual_seed(2)
    return RemoteMixtureOfExperts(HIDDEN, grid, k, client=network, config=config)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)


def local_mixture(
    x: torch.Tensor, gates: nn.ModuleList, experts: dict[Cell, Expert], k: int, alive: set[Cell] | None = None
) -> torch.Tensor:
    """Each row by itself: the scores of all cells, the softmax over the k best, their outputs; all by autograd."""
    experts = copy.deepcopy(experts)  # stepping, even with rate 0, would end autograd's record of them
    outputs = []
    for row in x:
        scores = {cell: sum(gate(row)[at] for gate, at in zip(gates, cell, strict=True)) for cell in (alive or experts)}
        best = sorted(scores, key=lambda cell: -scores[cell].item())[:k]
        weights = torch.stack([scores[cell] for cell in best]).softmax(0)
        outputs.append(
            sum(weight * experts[cell].module(row[None])[0] for weight, cell in zip(weights, best, strict=True))
        )
    return torch.stack(outputs)


def gradients(output: torch.Tensor, x: torch.Tensor, gates: nn.ModuleList) -> list[torch.Tensor]:
    x.grad = None
    gates.zero_grad()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return [x.grad.clone(), *(parameter.grad.clone() for parameter in gates.parameters())]


@pytest.mark.parametrize(("grid", "k"), [((3, 4), 3), ((3, 4), 1), ((7,), 2), ((2, 2, 3), 4)])
def test_outputs_and_gradients_are_those_of_a_local_mixture(grid: tuple[int, ...], k: int) -> None:
    experts = experts_at(list(itertools.product(*map(range, grid))))
    cells = sorted(experts)
    network = LocalNetwork({"a": {c: experts[c] for c in cells[::2]}, "b": {c: experts[c] for c in cells[1::2]}})
    moe, x = make(network, k, grid=grid), rows()
    output = moe(x)
    expected = local_mixture(x, moe.gates, experts, k)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    for own, local in zip(gradients(output, x, moe.gates), gradients(expected, x, moe.gates), strict=True):
        torch.testing.assert_close(own, local, atol=1e-6, rtol=1e-5)


def test_weights_of_those_that_answer_are_normalised_without_stragglers() -> None:
    experts = experts_at(ALL_CELLS)
    network = LocalNetwork({"a": experts})
    moe, x = make(network, config=SHORT), rows()
    moe(x)
    late = tuple(moe.cells[0, 0].tolist())  # the best expert of the first row
    network.silent.add(late)
    output = moe(x)
    experts = copy.deepcopy(experts)
    expected = torch.zeros_like(output)
    for row, cells in enumerate(moe.cells.tolist()):
        present = [tuple(cell) for cell in cells if tuple(cell) != late]
        scores = torch.stack(
            [sum(gate(x[row])[at] for gate, at in zip(moe.gates, cell, strict=True)) for cell in present]
        )
        weights = torch.exp(scores) / torch.exp(scores).sum()
        expected[row] = sum(w * experts[cell].module(x[row][None])[0] for w, cell in zip(weights, present, strict=True))
    assert not moe.answered[0, 0] and moe.answered.float().mean() > 0.5
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    for own, local in zip(gradients(output, x, moe.gates), gradients(expected, x, moe.gates), strict=True):
        torch.testing.assert_close(own, local, atol=1e-6, rtol=1e-5)
    asked = network.asked["a", late]
    moe(x)  # who was late is not waited for again
    assert network.asked["a", late] == asked and bool(moe.answered.all())
    assert not network.unanswered  # the late call was cancelled, for which the last pass gave it time


def test_rows_of_which_all_experts_failed_go_to_others() -> None:
    experts = experts_at(ALL_CELLS)
    network = LocalNetwork({"a": {c: experts[c] for c in ALL_CELLS[:6]}, "b": {c: experts[c] for c in ALL_CELLS[6:]}})
    moe, x = make(network, k=1), rows()
    network.down.add("a")
    output = moe(x)
    assert any(server == "a" for server, _ in network.asked)  # calls of some rows failed
    expected = local_mixture(x, moe.gates, experts, 1, set(ALL_CELLS[6:]))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    own, local = gradients(output, x, moe.gates)[0], gradients(expected, x, moe.gates)[0]
    torch.testing.assert_close(own, local, atol=1e-6, rtol=1e-5)


def test_too_few_answers_are_an_error_that_says_so() -> None:
    network = LocalNetwork({"a": experts_at(ALL_CELLS)})
    moe = make(network, config=MixtureConfig(k_min=2, timeout_s=0.2))
    network.down.add("a")
    with pytest.raises(PeerUnavailable, match=r"24 of 24 rows .* fewer than 2 experts of experts: .*no server answers"):
        moe(rows())
    with pytest.raises(PeerUnavailable, match="no server that can be called is known"):
        make(LocalNetwork({}))(rows())


def test_an_expert_that_fails_in_backward_contributes_no_gradient() -> None:
    experts = experts_at(ALL_CELLS)
    network = LocalNetwork({"a": experts})
    moe, x = make(network, k=2, config=SHORT), rows()
    output = moe(x)
    lost = tuple(moe.cells[0, 0].tolist())
    network.silent_backward.add(lost)
    own = gradients(output, x, moe.gates)
    frozen = copy.deepcopy(experts[lost].module)

    class Cut(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return frozen(inputs.detach())

    local = {**experts, lost: Expert(Cut(), 0.0, 1.0)}
    expected = gradients(local_mixture(x, moe.gates, local, 2), x, moe.gates)
    for mine, others in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, others, atol=1e-6, rtol=1e-5)


def test_a_backward_pass_that_nobody_answers_is_an_error() -> None:
    network = LocalNetwork({"a": experts_at(ALL_CELLS)})
    moe = make(network)
    output = moe(rows())
    network.down.add("a")
    with pytest.raises(PeerUnavailable, match="no expert of experts has answered the backward pass: no server answers"):
        output.sum().backward()


def test_experts_are_trained_though_the_rows_need_no_gradient() -> None:
    experts = experts_at(ALL_CELLS, learning_rate=0.1)
    moe = make(LocalNetwork({"a": experts}))
    moe(rows().detach()).sum().backward()
    used = {tuple(cell) for cell in moe.cells.flatten(0, 1).tolist()}
    assert {cell for cell, expert in experts.items() if expert.num_steps} == used
    with torch.no_grad():
        assert not moe(rows()).requires_grad


def test_large_batches_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_training.experts.core.config.MAX_CALL_BYTES", 5 * HIDDEN * 4)
    experts = experts_at([(0, 0)])
    network = LocalNetwork({"a": experts})
    moe, x = make(network), rows()
    torch.testing.assert_close(moe(x), experts[0, 0].module(x))
    assert network.batches == [5, 5, 5, 5, 4]


def test_shapes_and_empty_batches() -> None:
    moe = make(LocalNetwork({"a": experts_at(ALL_CELLS)}))
    x = rows().detach()
    torch.testing.assert_close(moe(x.view(2, 3, 4, HIDDEN)), moe(x).view(2, 3, 4, HIDDEN))
    assert moe(x[:0]).shape == (0, HIDDEN)
    low = moe.to(torch.bfloat16)(x.bfloat16())
    low.sum().backward()
    assert low.dtype == torch.bfloat16 and moe.gates[0].weight.grad is not None
    moe.close()


def test_mistakes_are_said() -> None:
    network = LocalNetwork({"a": experts_at(ALL_CELLS)})
    with pytest.raises(ValueError, match=r"\[3, 5\] .* expected floating-point numbers in \[…, 6\]"):
        make(network)(torch.zeros(3, 5))
    with pytest.raises(TrainingDiverged, match="rows are not finite"):
        make(network)(torch.full((3, HIDDEN), torch.nan))
    with pytest.raises(ValueError, match="expected 1 ≤ k_min ≤ k"):
        make(network, k=0)
    with pytest.raises(ValueError, match="expected a list of at least one multiaddr"):
        RemoteMixtureOfExperts(HIDDEN)
    with pytest.raises(ValueError, match="seconds above 0"):
        MixtureConfig(timeout_s=0.0)


def test_the_balance_loss_is_one_for_even_use_and_grows_when_one_expert_gets_all() -> None:
    network = LocalNetwork({"a": experts_at(ALL_CELLS)})
    moe = make(network, k=12)
    for gate in moe.gates:
        nn.init.zeros_(gate.weight)
        nn.init.zeros_(gate.bias)
    moe(rows())
    torch.testing.assert_close(moe.balance_loss, torch.tensor(1.0))
    with torch.no_grad():
        moe.gates[0].bias[0] = moe.gates[1].bias[0] = 20.0
    moe.k = moe._dispatcher._k = 1
    moe(rows())
    torch.testing.assert_close(moe.balance_loss, torch.tensor(3.5))  # the mean of 3 and 4, the sizes of the grid
    moe.balance_loss.backward()
    assert moe.gates[0].bias.grad is not None
