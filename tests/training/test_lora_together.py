"""Clients of one swarm train one adapter together, each on its own data: what plain PEFT gets from all of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from peft import get_peft_model
from transformers import PreTrainedModel

from swarm_training import TrainingRun
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, hosted
from tests.swarm.tuning import assert_close, lora, loss_of, padded_batch, trained, whole_model

STEPS = 3
LR = 0.05
ROWS = (3, 2)  # of one batch of each client
TARGET = 98  # tokens: about two batches of both
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServers]:
    with hosted(tmp_path_factory.mktemp("llama"), "0:2", "2:6") as servers:
        yield servers


def batch_of(client: int, call: int) -> Batch:
    return padded_batch(rows=ROWS[client], seed=1000 * client + call)


def num_tokens(batch: Batch) -> int:
    """Those that the loss is a mean over."""
    return int((batch["labels"][:, 1:] != -100).sum())


def train(model: PreTrainedModel, run: TrainingRun, client: int) -> tuple[list[int], list[list[torch.Tensor]]]:
    """For each global step, how many batches this client has given in all, and the adapter after it."""
    calls, adapters = [], []
    call = 0
    while run.num_steps < STEPS:
        batch = batch_of(client, call)
        loss_of(**batch)(model).backward()
        before = run.num_steps
        run.step(samples=num_tokens(batch))
        call += 1
        if run.num_steps != before:
            calls.append(call)
            adapters.append([parameter.detach().clone() for parameter in trained(model)])
    return calls, adapters


@pytest.mark.promise("clients of one swarm train one LoRA adapter together, as PEFT does on the data of all")
def test_two_clients_train_one_adapter_as_peft_does_on_the_data_of_both(servers: InProcessServers) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(servers)) for _ in ROWS]
        for seed, client in enumerate(clients):
            torch.manual_seed(seed)
            client.add_adapter(lora())
        torch.manual_seed(0)
        local = get_peft_model(whole_model(servers.model), lora()).eval()
        begun = [parameter.detach().clone() for parameter in trained(clients[0])]
        assert not all(torch.equal(a, b) for a, b in zip(*map(trained, clients), strict=True))

        runs: list[TrainingRun] = []
        for client in clients:
            optimizer = torch.optim.SGD(trained(client), lr=LR)
            peers = runs[0].initial_peers if runs else []
            run = TrainingRun("adapter", trained(client), optimizer, target_batch_size=TARGET, initial_peers=peers)
            runs.append(stack.enter_context(run))
        for client in (*clients, local):
            assert all(torch.equal(own, founders) for own, founders in zip(trained(client), begun, strict=True))

        with ThreadPoolExecutor() as threads:
            ends = list(threads.map(train, clients, runs, range(len(clients))))
        assert all(len(run.last_group) == 2 for run in runs)

        optimizer = torch.optim.SGD(trained(local), lr=LR)
        for step in range(STEPS):
            union = [
                batch_of(client, call)
                for client, (calls, _) in enumerate(ends)
                for call in range(calls[step - 1] if step else 0, calls[step])
            ]
            loss_of(**{key: torch.cat([batch[key] for batch in union]) for key in union[0]})(local).backward()
            optimizer.step()
            optimizer.zero_grad()
            (_, first), (_, second) = ends
            for one, other, expected in zip(first[step], second[step], trained(local), strict=True):
                assert torch.equal(one, other)
                assert_close(one, expected)
        assert not any(torch.equal(parameter, old) for parameter, old in zip(trained(local), begun, strict=True))
