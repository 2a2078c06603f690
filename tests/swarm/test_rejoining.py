"""All servers are killed and others come: a client that was there before goes on, in whatever it was doing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client import DistributedModel
from swarm_client.core.events import Waiting
from tests.swarm.pair import ends_only_at_its_length, random_ids
from tests.swarm.survival import Moments
from tests.swarm.test_training_survival import loss_and_gradient
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.unit.support import quiet_port
from tests.zoo import save_checkpoint

PROMPT = random_ids(1, 9, seed=40)
SPANS = "0:3", "3:6"
NEW_TOKENS = 12


class Generations:
    """Servers of one small model; ``replace`` kills them all and starts others.

    Args:
        first: options of the server that is started first.
    """

    def __init__(self, cluster: LocalCluster, model: Path, swarm: str, first: Sequence[str]) -> None:
        self._cluster = cluster
        self._options = ["--model", str(model), "--swarm", swarm, "--quant", "none", "--throughput", "75"]
        self._first = first
        self.servers: list[LocalServer] = []

    def start(self) -> None:
        for blocks, options in zip(SPANS, (self._first, []), strict=True):
            known = ["--blocks", blocks, "--cache-tokens", "512"]
            self.servers.append(self._cluster.start(*self._options, *known, *options))
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(lambda: len(self.servers) == len(SPANS), "servers are started")
        self._cluster.wait_ready(self.servers)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()
        for server in self.servers:
            assert server.wait_gone(DEADLINE_S)
        self.servers.clear()

    def replace(self) -> None:
        self.kill()
        self.start()


class Survivor:
    """The client, and what it must compute."""

    def __init__(self, model: Path, **options: Any) -> None:
        self._listener: Callable[[], object] | None = None
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.whole = ends_only_at_its_length(whole)
        remote = DistributedModel.from_pretrained(str(model), on_event=self._heard, draft="none", **options)
        self.remote = ends_only_at_its_length(remote)

    def when_it_waits(self, action: Callable[[], object]) -> None:
        self._listener = action

    def assert_generates(self) -> None:
        options = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        tokens = self.remote.generate(PROMPT, **options)
        assert torch.equal(tokens, self.whole.generate(PROMPT, **options))

    def assert_trains(self, between: Callable[[], object]) -> None:
        loss, gradient = loss_and_gradient(self.remote, between)
        expected_loss, expected_gradient = loss_and_gradient(self.whole)
        assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)

    def _heard(self, event: object) -> None:
        if isinstance(event, Waiting) and self._listener is not None:
            action, self._listener = self._listener, None
            threading.Thread(target=action).start()  # this one belongs to the network


@pytest.fixture(scope="module", params=["registered-on-this-machine", "bootstrap-node-at-its-old-address"])
def met(request, cluster, tmp_path_factory) -> Iterator[tuple[Generations, Survivor]]:
    """Servers and a client that has found them, through what is to lead it to others later."""
    directory = tmp_path_factory.mktemp("rejoining")
    model, swarm = directory / "llama", f"rejoining-{os.getpid()}-{directory.name}"
    save_checkpoint("llama", model)
    is_registered = request.param == "registered-on-this-machine"
    bootstrap = ["--dht-port", str(quiet_port()), "--identity", str(directory / "identity")]
    servers = Generations(cluster, model, swarm, [] if is_registered else bootstrap)
    servers.start()
    peers = {} if is_registered else {"initial_peers": [servers.servers[0].ready["peer"]]}
    survivor = Survivor(model, **{"swarm": swarm, "recovery_timeout_s": 240.0, "wait_timeout_s": 240.0, **peers})
    yield servers, survivor
    survivor.remote.close()
    servers.kill()


def test_a_generation_goes_on(met, moments: Moments) -> None:
    servers, survivor = met
    moments.before_step(5, servers.kill)
    survivor.when_it_waits(servers.start)
    survivor.assert_generates()
    servers.wait_ready()


def test_the_next_generation_finds_those_who_came(met) -> None:
    servers, survivor = met
    servers.replace()
    survivor.assert_generates()


def test_training_goes_on(met) -> None:
    servers, survivor = met
    survivor.assert_trains(between=servers.replace)
