"""Processes that have trained a model in stages serve it, and a swarm of them writes what the exported model writes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client import DistributedModel
from tests.swarm.processes import ServerProcess
from tests.swarm.test_stages import TOKENIZER, text  # noqa: F401 (a fixture)
from tests.swarm.waiting import wait_for

STEPS = 3


def address_of(process: ServerProcess) -> str:
    def said() -> list[str]:
        return [line for line in process.stdout if "--initial-peers" in line]

    return wait_for(said, "a stage is served")[0].split("--initial-peers ")[1].split()[0]


def is_serving(process: ServerProcess) -> bool:
    return any(line.startswith("ready ") for line in process.stdout)


@pytest.mark.slow
def test_the_processes_that_trained_serve_the_model(text: str, tmp_path: Path) -> None:  # noqa: F811
    run_file, model, cache = tmp_path / "RUN.toml", tmp_path / "servers" / "squares", tmp_path / "cache"
    run_file.write_text(text)
    cache.mkdir()
    running: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        running.append(ServerProcess(*arguments, cache=cache, wait=False, module="swarm_training.stages"))
        return running[-1]

    def stage(index: int, *peers: str) -> ServerProcess:
        flags = ["--then-serve", str(model), "--steps", str(STEPS), "--quant", "none", "--host", "127.0.0.1"]
        return start("serve", str(run_file), "--stage", str(index), *flags, *peers)

    try:
        first = stage(0)
        peers = ["--initial-peers", address_of(first)]
        second = stage(1, *peers)
        address_of(second)
        start("trainer", str(run_file), *peers, "--steps", str(STEPS))
        wait_for(lambda: is_serving(first) and is_serving(second), "both stages are served")
        late = stage(1, *peers)
        wait_for(lambda: is_serving(late), "one who comes late serves too")
        own = tmp_path / "own" / "squares"
        start("export", str(run_file), str(own), *peers)
        wait_for((own / "config.json").exists, "it is exported")
        prompt = torch.tensor([[5, 6, 7, 8]])
        expected = AutoModelForCausalLM.from_pretrained(own).generate(prompt, max_new_tokens=12, do_sample=False)
        with DistributedModel.from_pretrained(str(own), initial_peers=peers[1:], swarm="whole") as remote:
            assert torch.equal(remote.generate(prompt, max_new_tokens=12, do_sample=False), expected)
        with DistributedModel.from_pretrained(str(own), swarm="whole") as remote:  # as found on this machine
            assert torch.equal(remote.generate(prompt, max_new_tokens=12, do_sample=False), expected)
        assert first.terminate() == 128 + signal.SIGTERM
    finally:
        for process in running:
            process.kill()
