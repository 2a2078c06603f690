"""The libp2p daemon of a server is killed: it is in the swarm again, and says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client import DistributedModel
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import NoSwarm
from tests.swarm.harness import records_through
from tests.swarm.pair import ends_only_at_its_length, random_ids
from tests.swarm.processes import ServerProcess, is_alive
from tests.swarm.waiting import wait_for
from tests.zoo import BLOCKS

PROMPT = random_ids(1, 9, seed=41)


def assert_generates(checkpoint: Path, model) -> None:
    options = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 8, "do_sample": False}
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    assert torch.equal(ends_only_at_its_length(model).generate(PROMPT, **options), whole.generate(PROMPT, **options))


@pytest.mark.promise("a server whose libp2p daemon dies restarts it and is found again")
def test_a_server_is_found_again(server_process, llama, tmp_path) -> None:
    swarm = f"daemon-{os.getpid()}"
    known = ["--model", str(llama), "--quant", "none", "--throughput", "75", "--swarm", swarm]
    server: ServerProcess = server_process(*known, "--blocks", f"0:{BLOCKS}")
    (daemon,) = server.children()

    def record() -> ServerRecord | None:
        try:
            return next(iter(records_through(server.ready["peer"], swarm, llama.name)), None)
        except NoSwarm:
            return None

    before = record()
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: not is_alive(daemon), "the daemon is gone")
    after = wait_for(
        lambda: (found := record()) and found.expires_at > before.expires_at and found, "its record is published again"
    )
    assert after.peer_id == before.peer_id and server.ready["peer"].endswith(after.peer_id)
    with DistributedModel.from_pretrained(
        str(llama), initial_peers=[server.ready["peer"]], swarm=swarm, draft="none"
    ) as model:
        assert_generates(llama, model)
    assert server.stderr.count("the libp2p daemon has ended") == 1 and "Traceback" not in server.stderr
    assert server.terminate() == 0
