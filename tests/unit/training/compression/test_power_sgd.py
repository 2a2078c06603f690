"""PowerSGD among simulated peers, beside the mean and the best approximation of its rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.compression.power_sgd import PowerSGD

SHAPES = [(40, 30), (30,), (8, 5, 4), (2, 2), ()]
SIZES = [1200, 30, 160, 4, 1]
N = sum(SIZES)


def gradients(peers: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(peers, N, generator=torch.Generator().manual_seed(seed)))


def average(compressors: Sequence[Compressor], given: Sequence[Tensor]) -> list[Tensor]:
    """What each peer gets; the vectors of each phase are averaged in the peers' order."""
    phases = [compressor.phases(gradient) for compressor, gradient in zip(compressors, given, strict=True)]
    sent = [next(phase) for phase in phases]
    while True:
        mean = torch.stack(sent).mean(0)
        sent, results = [], []
        for phase in phases:
            try:
                sent.append(phase.send(mean))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not sent, "some peers are done, others are not"
            return results


def test_plain_gradients_are_averaged() -> None:
    given = gradients(3)
    for result in average([Plain() for _ in given], given):
        assert torch.equal(result, torch.stack(given).mean(0))
    assert Plain().state_dict() == {}
    with pytest.raises(ValueError, match="no state, but got q"):
        Plain().load_state_dict({"q": torch.zeros(1)})


def test_peers_end_bit_identical_and_small_tensors_are_exact() -> None:
    peers = [PowerSGD(SHAPES, 2, "run") for _ in range(4)]
    for step in range(3):
        given = gradients(4, step)
        results = average(peers, given)
        assert all(torch.equal(result, results[0]) for result in results)
        mean = torch.stack(given).mean(0)
        assert torch.equal(results[0][1200:1230], mean[1200:1230])
        assert torch.equal(results[0][1390:], mean[1390:])
        assert torch.linalg.matrix_rank(results[0][:1200].view(40, 30)) == 2
    states = [peer.state_dict() for peer in peers]
    assert list(states[0]) == ["q.0", "q.2"]
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])


def test_vectors_are_as_small_as_they_should_be() -> None:
    peer = PowerSGD(SHAPES, 2)
    phases = peer.phases(gradients(1)[0])
    first = next(phases)
    second = phases.send(first)
    assert len(first) == 40 * 2 + 30 + 8 * 2 + 4 + 1
    assert len(second) == 30 * 2 + 20 * 2


def test_errors_come_later() -> None:
    """The mean of what arrived over many steps comes to the mean of what was given."""
    peers = [PowerSGD(SHAPES, 2) for _ in range(2)]
    given = gradients(2)
    mean, total = torch.stack(given).mean(0), torch.zeros(N)
    distances = []
    for step in range(1, 201):
        total += average(peers, given)[0]
        distances.append(float((total / step - mean).norm() / mean.norm()))
    assert distances[0] > 0.8 and distances[-1] < 0.12
    assert distances[-1] < distances[49] / 2


def test_a_gradient_of_low_rank_arrives_whole_and_revives() -> None:
    peer = PowerSGD([(40, 30)], 3)
    generator = torch.Generator().manual_seed(3)
    low = torch.outer(torch.randn(40, generator=generator), torch.randn(30, generator=generator)).flatten()
    for _ in range(3):
        torch.testing.assert_close(average([peer], [low])[0], low)
    torch.testing.assert_close(average([peer], [torch.zeros(1200)])[0], torch.zeros(1200), rtol=0, atol=1e-4)
    full = torch.randn(1200, generator=generator)
    result = average([peer], [full])[0]
    assert torch.linalg.matrix_rank(result.view(40, 30)) == 3


def test_a_round_that_fails_changes_nothing() -> None:
    a, b = PowerSGD(SHAPES, 2), PowerSGD(SHAPES, 2)
    first, second, third = gradients(3)
    for peer in (a, b):
        average([peer], [first])
    phases = b.phases(third)
    phases.send(next(phases))
    phases.close()
    assert torch.equal(average([a], [second])[0], average([b], [second])[0])


def test_a_gradient_that_is_not_finite_leaves_no_trace_in_the_state() -> None:
    peer = PowerSGD(SHAPES, 2)
    before = peer.state_dict()
    bad = gradients(1)[0]
    bad[5] = torch.nan
    assert not average([peer], [bad])[0].isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in peer.state_dict().items())
    assert average([peer], gradients(1))[0].isfinite().all()


def test_a_joiner_takes_q_from_a_peer() -> None:
    old = [PowerSGD(SHAPES, 2, "run") for _ in range(2)]
    average(old, gradients(2))
    new = PowerSGD(SHAPES, 2, "run")
    new.load_state_dict(old[0].state_dict())
    results = average([*old, new], gradients(3, 1))
    assert torch.equal(results[0], results[2])


def test_runs_and_tensors_start_from_other_directions() -> None:
    a, again, other = PowerSGD(SHAPES, 2, "a"), PowerSGD(SHAPES, 2, "a"), PowerSGD(SHAPES, 2, "b")
    assert torch.equal(a.state_dict()["q.0"], again.state_dict()["q.0"])
    assert not torch.equal(a.state_dict()["q.0"], other.state_dict()["q.0"])


def test_wrong_ranks_and_states_are_refused() -> None:
    with pytest.raises(ValueError, match="rank of 0 is too small"):
        PowerSGD(SHAPES, 0)
    with pytest.raises(ValueError, match="expected"):
        PowerSGD(SHAPES, 2).load_state_dict(PowerSGD(SHAPES, 3).state_dict())


def test_nothing_to_compress_takes_one_round() -> None:
    given = gradients(2)
    peers = [PowerSGD([(N,)], 4) for _ in given]
    assert torch.equal(average(peers, given)[0], torch.stack(given).mean(0))
