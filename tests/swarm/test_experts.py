"""Experts on real servers: found in a real DHT, called over gRPC, killed, and started while others train."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from swarm_training.experts import ExpertClient, ExpertServer, ExpertServerConfig, MixtureConfig, RemoteMixtureOfExperts
from swarm_training.experts.command_line import main
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import wait_for

HIDDEN, GRID = 8, (4, 6)
QUICK = MixtureConfig(refresh_s=0.2, ban_s=10.0)


def config(
    num_experts: int, *initial_peers: str, directory: Path | None = None, rate: float = 0.0
) -> ExpertServerConfig:
    return ExpertServerConfig(
        "demo", HIDDEN, GRID, num_experts, learning_rate=rate, initial_peers=initial_peers, directory=directory
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ExpertServer]]:
    """Two that do not train, with half of the cells."""
    torch.manual_seed(0)
    with ExpertServer(config(5)) as first, ExpertServer(config(7, *first.initial_peers)) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def client(servers: list[ExpertServer]) -> Iterator[ExpertClient]:
    with ExpertClient(servers[1].initial_peers) as client:
        yield client


@pytest.mark.promise("a layer's experts are on servers, and its gradients are those of a local layer")
def test_the_best_living_experts_are_found_and_gradients_are_exact(
    servers: list[ExpertServer], client: ExpertClient
) -> None:
    torch.manual_seed(1)
    moe = RemoteMixtureOfExperts(HIDDEN, GRID, 4, name="demo", client=client)
    modules = {cell: expert.module for server in servers for cell, expert in server.experts.items()}
    assert len(modules) == 12 and modules.keys() <= set(itertools.product(*map(range, GRID)))
    cells = sorted(modules)
    x = torch.randn(40, HIDDEN, requires_grad=True)
    output = moe(x)
    # of all living cells, with no network between
    scores = torch.stack([moe.gates[0](x)[:, i] + moe.gates[1](x)[:, j] for i, j in cells], 1)
    best, places = scores.topk(4, dim=1)
    assert moe.cells.tolist() == torch.tensor(cells)[places].tolist()
    outputs = torch.stack([modules[cell](x) for cell in cells], 1)
    local = (best.softmax(1)[:, :, None] * outputs.gather(1, places[:, :, None].expand(-1, -1, HIDDEN))).sum(1)
    torch.testing.assert_close(output, local, atol=1e-6, rtol=1e-5)
    wanted = [x, *moe.parameters()]
    target = torch.randn(40, HIDDEN)
    expected = torch.autograd.grad((local * target).sum(), wanted)
    for own, by_hand in zip(torch.autograd.grad((output * target).sum(), wanted), expected, strict=True):
        torch.testing.assert_close(own, by_hand, atol=1e-6, rtol=1e-5)


@pytest.mark.promise("a mixture keeps training when a server of experts dies, and uses one that appears")
def test_training_goes_on_when_a_server_is_killed_and_uses_one_that_appears(tmp_path: Path) -> None:
    def serve(num_experts: int, *more: str) -> ServerProcess:
        sizes = ["--hidden", str(HIDDEN), "--grid", *map(str, GRID), "--learning-rate", "0.01"]
        return ServerProcess(
            *["serve", "--name", "demo", "--experts", str(num_experts), *sizes, *more],
            cache=tmp_path,
            module="tests.swarm.brief_experts",
        )

    with ExpertServer(config(6, rate=0.01)) as first:
        (peer,) = first.initial_peers
        victim = serve(4, "--initial-peers", peer)
        lost = cells_of(victim)
        torch.manual_seed(0)
        with ExpertClient([peer]) as client:
            moe = RemoteMixtureOfExperts(HIDDEN, GRID, 4, name="demo", client=client, config=QUICK)
            training = Training(moe)
            wait_for(lambda: training.step() and training.used() & lost, "experts of the second server are used")
            before = training.loss()
            victim.kill()
            for _ in range(30):
                training.step()
            assert not training.used() & lost and training.loss() < before
            with ExpertServer(config(6, peer, rate=0.01)) as third:
                new = set(third.experts)
                assert not new & first.experts.keys()
                # what the killed one has announced may last for a while, and then its cells are free
                wait_for(lambda: training.step() and training.used() & new, "experts that have appeared are used")
            training.step()
            wait_for(lambda: training.step() and not training.used() & new, "who has left is asked no more")
            moe.close()


class Training:
    """The layer learns a function of its own input."""

    def __init__(self, moe: RemoteMixtureOfExperts) -> None:
        self._moe = moe
        self._x = torch.randn(64, HIDDEN)
        self._y = torch.tanh(self._x @ torch.randn(HIDDEN, HIDDEN))
        self._optimizer = torch.optim.Adam(moe.parameters(), lr=0.01)

    def step(self) -> bool:
        loss = nn.functional.mse_loss(self._moe(self._x), self._y) + 0.01 * self._moe.balance_loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return True

    @torch.no_grad()
    def loss(self) -> float:
        return nn.functional.mse_loss(self._moe(self._x), self._y).item()

    def used(self) -> set[tuple[int, ...]]:
        return {tuple(cell) for cell in self._moe.cells[self._moe.answered].tolist()}


def cells_of(server: ServerProcess) -> set[tuple[int, ...]]:
    return {tuple(map(int, name.split(".")[1:])) for name in server.ready["experts"].split(",")}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--experts", "99"], 2, "99 experts: expected 1 to 24"),
        (["--import", "no_such_module"], 2, "--import: No module named 'no_such_module'"),
        (["--kind", "none"], 1, "experts of kind 'none' are not known: expected one of"),
        (["--cells", "1.2", "4.0"], 2, "'4.0' is no expert of demo: expected 2 numbers of the grid (4, 6)"),
        (["--replicas", "9"], 2, "replicas is 9: expected 0 to 8"),
        (["--host", "0.0.0.0"], 2, "nobody can call 0.0.0.0"),
        (["--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{'Qm' + 'Y' * 44}"], 1, "no initial peer answered"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["serve", "--name", "demo", "--hidden", "8", "--grid", "4", "6"]
    with pytest.raises(SystemExit) as end:
        main([*base, *arguments])
    said = capsys.readouterr().err
    assert end.value.code == code and said.count("\n") == 1
    assert said.startswith("error: ") and message in said
