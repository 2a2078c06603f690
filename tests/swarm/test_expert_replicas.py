"""The server of an expert is killed; whoever takes its place goes on from the newest replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from swarm_protocol.process import network_loop
from swarm_training.experts import ExpertClient, ExpertServer, ExpertServerConfig
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.server.registry import build
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import wait_for

HIDDEN, GRID, RATE = 8, (4, 6), 0.01
CELLS: list[Cell] = [(1, 2), (3, 5)]
FLAGS = ["serve", "--name", "demo", "--hidden", str(HIDDEN), "--grid", *map(str, GRID), "--learning-rate", str(RATE)]
QUICK = ExpertServerConfig("demo", HIDDEN, GRID, 1, learning_rate=RATE, replicate_every_s=0.1)
APART = replace(QUICK, cells=((0, 0),))  # in none of those cells
State = dict[str, torch.Tensor]


def beside(server: ExpertServer, **changed: Any) -> ExpertServerConfig:
    return replace(QUICK, initial_peers=tuple(server.initial_peers), **changed)


def victim(peer: str, cache: Path) -> ServerProcess:
    cells = [".".join(map(str, cell)) for cell in CELLS]
    return ServerProcess(
        *[
            *FLAGS,
            "--cells",
            *cells,
            "--initial-peers",
            peer,
            "--replicate-every",
            "0.1",
            "--identity",
            str(cache / "key"),
        ],
        cache=cache,
        module="tests.swarm.brief_experts",
    )


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and gradients of outputs: [4, hidden] each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, HIDDEN, generator=generator), torch.randn(4, HIDDEN, generator=generator)


def train(client: ExpertClient, cell: Cell, seeds: range) -> None:
    board = client.board("demo", GRID, HIDDEN)

    async def training() -> None:
        holder = (await board.read({cell[:-1]}))[cell[:-1]][cell[-1]][0]
        for seed in seeds:
            await client.calls.backward(holder, "demo", cell, *batch(seed))

    network_loop.run(training())


def kept(server: ExpertServer, cell: Cell) -> State | None:
    data = server._keeper.data(cell)
    return None if data is None else safetensors.torch.load(data)


def wait_for_version(server: ExpertServer, cell: Cell, num_steps: int) -> State:
    def newest() -> State | None:
        state = kept(server, cell)
        return state if state is not None and int(state["num_steps"]) == num_steps else None

    return wait_for(newest, f"a replica of {cell} after {num_steps} steps")


def replayed(state: State, seeds: range) -> State:
    """The same updates here, of a module that no server has touched."""
    own = Expert(build("feedforward", HIDDEN), RATE, 1.0)
    own.load(state)
    for seed in seeds:
        own.backward(*batch(seed))
    return own.state()


def assert_same(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_who_takes_the_place_of_a_killed_server_has_the_newest_replica(tmp_path: Path) -> None:
    steps = 7
    with ExpertServer(APART) as first, ExpertServer(beside(first, cells=((0, 1),))) as second:
        with victim(first.initial_peers[0], tmp_path) as server, ExpertClient(first.initial_peers) as client:
            begun = {cell: wait_for_version(first, cell, 0) for cell in CELLS}
            for cell in CELLS:
                train(client, cell, range(steps))
            for keeper in (first, second):  # two servers have each
                for cell in CELLS:
                    assert_same(wait_for_version(keeper, cell, steps), replayed(begun[cell], range(steps)))
            server.kill()
        server = victim(first.initial_peers[0], tmp_path)  # by its key, it has its cells at once
        with server, ExpertClient(first.initial_peers) as client:
            assert server.ready["experts"] == "demo.1.2,demo.3.5"
            train(client, CELLS[0], range(steps, steps + 1))
            expected = replayed(begun[CELLS[0]], range(steps + 1))
            assert_same(wait_for_version(second, CELLS[0], steps + 1), expected)
            server.kill()
        # another server, here, so that what it has can be looked at before anybody trains it
        patient = beside(first, cells=tuple(CELLS), num_experts=2)
        with ExpertServer(patient) as third:
            assert_same(third.experts[CELLS[0]].state(), expected)
            assert_same(third.experts[CELLS[1]].state(), replayed(begun[CELLS[1]], range(steps)))


def test_an_expert_that_is_gone_for_some_time_is_adopted_and_goes_on(tmp_path: Path) -> None:
    adopting = replace(APART, adopt=1, adopt_after_s=0.5)
    with ExpertServer(adopting) as first:
        peers = tuple(first.initial_peers)
        with victim(peers[0], tmp_path) as server, ExpertClient(peers) as client:
            begun = {cell: wait_for_version(first, cell, 0) for cell in CELLS}
            for cell in CELLS:
                train(client, cell, range(4))
                wait_for_version(first, cell, 4)
            server.kill()
            own = set(first.experts)
            wait_for(lambda: set(first.experts) - own, "an expert is adopted")
            (cell,) = set(first.experts) - own  # no more than one
            assert_same(first.experts[cell].state(), replayed(begun[cell], range(4)))
            wait_for(lambda: is_announced_by(client, cell, first.peer_id), "the adopted expert is announced")
            train(client, cell, range(4, 5))
            assert_same(first.experts[cell].state(), replayed(begun[cell], range(5)))


def is_announced_by(client: ExpertClient, cell: Cell, peer_id: str) -> bool:
    found = network_loop.run(client.board("demo", GRID, HIDDEN).read({cell[:-1]}))[cell[:-1]]
    return [holder.peer_id for holder in found.get(cell[-1], [])] == [peer_id]


def test_saved_experts_are_loaded_from_replicas_only_if_those_are_newer(tmp_path: Path) -> None:
    with ExpertServer(QUICK) as first:
        config = beside(first, directory=tmp_path / "experts", save_every_s=3600.0)
        with ExpertServer(config) as second, ExpertClient(first.initial_peers) as client:
            ((cell, expert),) = second.experts.items()
            train(client, cell, range(2))
        older = expert.state()  # saved when it ended
        with (
            ExpertServer(replace(config, directory=None, cells=(cell,))) as third,
            ExpertClient(first.initial_peers) as client,
        ):
            train(client, cell, range(2, 4))
            newer = third.experts[cell].state()
        with ExpertServer(config) as again:
            assert_same(again.experts[cell].state(), newer)
        assert_same(newer, replayed(older, range(2, 4)))
        alone = ExpertServer(replace(config, initial_peers=(), replicas=0))
        with alone, ExpertClient(alone.initial_peers) as client:  # what the keeper has is older from now on
            train(client, cell, range(4, 6))
            newest = alone.experts[cell].state()
        with ExpertServer(config) as again:
            assert_same(again.experts[cell].state(), newest)
