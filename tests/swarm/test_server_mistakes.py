"""Every mistake on the server's command line gets one clear sentence, no traceback, and leaves no process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quick_keys import new_identity
from tests.swarm.processes import Outcome, run_commands
from tests.zoo import save_checkpoint


@dataclass(frozen=True)
class Mistake:
    arguments: list[str]
    sentence: str
    code: int = 1  # 2: the command line says it


@dataclass(frozen=True)
class Places:
    """What mistakes can be made with."""

    models: Path
    busy_port: int

    def model(self, name: str) -> list[str]:
        return ["--model", str(self.models / name)]

    @property
    def good(self) -> list[str]:
        return [*self.model("good"), "--quant", "none", "--throughput", "1"]


def damaged(directory: Path, name: str) -> Path:
    """Another good checkpoint, to be damaged."""
    save_checkpoint("llama", directory / name)
    return directory / name


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[Places]:
    models = tmp_path_factory.mktemp("models")
    damaged(models, "good")
    for shard in shards(damaged(models, "wrong-shape")):
        tensors = load_file(shard)
        name = "model.layers.3.mlp.up_proj.weight"
        if name in tensors:
            save_file({**tensors, name: torch.zeros(5, 7)}, shard, metadata={"format": "pt"})
    save_checkpoint("llama", models / "recurrent")
    (models / "recurrent" / "config.json").write_text('{"model_type": "recurrent_gemma"}')
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as busy:  # it would share its port, as libp2p does
        yield Places(models, busy.getsockname()[1])


def mistakes(places: Places) -> dict[str, Mistake]:
    nobody = new_identity().peer_id
    good = places.good
    return {
        "nobody-at-the-initial-peer": Mistake(
            [*good, "--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}"],
            rf"no initial peer answered: /ip4/127\.0\.0\.1/tcp/1/p2p/{nobody}",
        ),
        "unsupported-family": Mistake(places.model("recurrent"), "recurrent_gemma.* state in themselves"),
        "wrong-shape": Mistake(
            [*places.model("wrong-shape"), "--quant", "none", "--throughput", "1"],
            r"layers.3.mlp.up_proj.weight has shape \[5, 7\], expected \[96, 64\]",
        ),
        "port-in-use": Mistake(
            [*good, "--port", str(places.busy_port)], f"cannot listen on .*:{places.busy_port}: the port"
        ),
        "dht-port-in-use": Mistake(
            [*good, "--dht-port", str(places.busy_port)], f"cannot listen on .*:{places.busy_port}: the port"
        ),
        "metrics-port-in-use": Mistake(
            [*good, "--metrics-port", str(places.busy_port)],
            f"metrics cannot be served on port {places.busy_port} of 127.0.0.1: Address already in use",
        ),
    }


@pytest.fixture(scope="module")
def outcomes(places, tmp_path_factory) -> dict[str, tuple[Mistake, Outcome]]:
    made = mistakes(places)
    commands = [mistake.arguments for mistake in made.values()]
    ended = run_commands("swarm_server", commands, cache=tmp_path_factory.mktemp("user"))
    return {name: (made[name], outcome) for name, outcome in zip(made, ended, strict=True)}


@pytest.mark.parametrize("name", mistakes(Places(Path("models"), 1)))
def test_one_sentence_and_nothing_left(outcomes, name):
    mistake, outcome = outcomes[name]
    outcome.assert_one_sentence(mistake.sentence, mistake.code)
