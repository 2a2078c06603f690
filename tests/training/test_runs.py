"""Runs of real processes on loopback: equal bits, also by the Trainer, and what happens when some of them fail."""

from __future__ import annotations

import signal
from statistics import mean

import pytest
import torch

from tests.marks import SLOW
from tests.training.processes import Volunteer, volunteers
from tests.training.trainer_volunteer import STEPS
from tests.training.volunteer import batch, digest, loss_of, model

SIZE = 50
SLOWLY = {"call_s": 0.2}  # beside the time that news take


def reference(peers: list[Volunteer], samples: int, target_steps: int) -> list[str]:
    """Digests of the parameters that one process gets from the batches of all, by step.

    It adds them up in the same order and precision, and so comes near to training on the union of the batches.
    """
    exact, plain = model(SIZE), model(SIZE)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=0.01)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    by_id = {peer.wait_for("joined")["peer_id"]: peer for peer in peers}
    digests = []
    calls = {peer: 0 for peer in by_id}
    for step in range(1, target_steps + 1):
        total, weight, inputs = None, 0, []
        for peer_id in by_id[next(iter(by_id))].steps()[step]["members"]:
            peer = by_id[peer_id]
            until = peer.steps()[step]["calls"]
            batches = [batch(peer.number, call, samples, SIZE) for call in range(calls[peer_id], until)]
            calls[peer_id] = until
            inputs += batches
            count = samples * len(batches)
            own = torch.zeros(sum(each.numel() for each in exact.parameters()))
            for each in batches:
                gradients = torch.autograd.grad(loss_of(exact, each), list(exact.parameters()))
                own += torch.cat([gradient.reshape(-1) * samples for gradient in gradients])
            part = own / count * float(count)
            total = part if total is None else total + part
            weight += count
        mean = total / weight
        sizes = [each.numel() for each in exact.parameters()]
        for parameter, part in zip(exact.parameters(), mean.split(sizes), strict=True):
            parameter.grad = part.view(parameter.shape)
        optimizer.step()
        digests.append(digest(exact))
        plain_optimizer.zero_grad()
        loss_of(plain, torch.cat(inputs)).backward()
        plain_optimizer.step()
    for parameter, other in zip(exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
    return digests


def finish(peers: list[Volunteer]) -> None:
    for peer in peers:
        peer.wait_for("done")
    for peer in peers:
        peer.leave()
    for peer in peers:
        peer.require_ended()


def require_equal(peers: list[Volunteer], from_step: int, to_step: int) -> None:
    for step in range(from_step, to_step + 1):
        digests = {peer.steps()[step]["digest"] for peer in peers if step in peer.steps()}
        assert len(digests) == 1, f"step {step}"


@pytest.mark.promise("peers train as one process does, to the bit, also when one of them is killed")
def test_four_peers_of_whom_one_is_killed_train_as_one_process_does() -> None:
    victim = {"call_s": 0.1, "moment": "meeting", "at_step": 2}
    with volunteers([{"call_s": 0.05}, {"call_s": 0.1}, {"call_s": 0.07}, victim], steps=4, target=32) as peers:
        for peer in peers:
            peer.go()
        *survivors, killed = peers
        killed.wait_for("struck")
        finish(survivors)
        digests = reference(peers, samples=4, target_steps=4)
        for peer in survivors:
            steps = peer.steps()
            assert [steps[step]["digest"] for step in range(1, 5)] == digests
            assert [len(steps[step]["members"]) for step in range(1, 5)] == [4, 4, 3, 3]


@pytest.mark.parametrize(("moment", "name"), [("meeting", "SIGSTOP"), ("reducing", "SIGKILL")])
@SLOW
def test_survivors_of_a_failure_stay_equal_and_go_on(moment: str, name: str) -> None:
    tasks = [SLOWLY, SLOWLY, {**SLOWLY, "moment": moment, "at_step": 1, "signal": name}, SLOWLY]
    with volunteers(tasks, steps=5, target=48) as peers:
        for peer in peers:
            peer.go()
        victim = peers[2]
        victim.wait_for("struck")
        survivors = [peer for peer in peers if peer is not victim]
        for peer in survivors:
            peer.wait_for("step", step=4)
        if name == "SIGSTOP":
            victim.send_signal(signal.SIGCONT)
            victim.wait_for("done")
            survivors = peers
        finish(survivors)
        require_equal(peers, 1, 5)


@SLOW
def test_two_trainers_end_with_equal_parameters() -> None:
    with volunteers([{}, {}], program="tests.training.trainer_volunteer") as peers:
        joined = [peer.wait_for("joined")["digest"] for peer in peers]
        assert joined[0] == joined[1]
        for peer in peers:
            peer.go()
        done = [peer.wait_for("done") for peer in peers]
        for peer in peers:
            peer.finish()
        assert done[0]["digest"] == done[1]["digest"] != joined[0]
        for said in done:
            assert said["steps"] == STEPS and said["members"] == 2
            assert mean(said["losses"][-10:]) < 0.5 * mean(said["losses"][:4])
