"""Several processes as one server: clients see one, and lose one when a member dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from swarm_client import DistributedModel
from swarm_server.group import links
from tests.swarm.harness import InProcessServers, Watcher
from tests.swarm.waiting import wait_for
from tests.zoo import VOCAB, save_checkpoint

pytestmark = pytest.mark.skipif(links.library() is None, reason="no compiled kernel")

PROMPT = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_member_killed_in_mid_generation(server_process, tmp_path: Path) -> None:
    """The other server goes on with the same tokens, and the group's server is there again, alone."""
    model = tmp_path / "model"
    save_checkpoint("llama", model, hidden_size=128, intermediate_size=320)
    with InProcessServers(model) as servers:
        servers.start("0:6", quant="int8", throughput=1.0)
        known = ["--swarm", servers.swarm, "--initial-peers", *servers.initial_peers]
        client = {"initial_peers": servers.initial_peers, "swarm": servers.swarm}
        with DistributedModel.from_pretrained(str(model), **client) as alone:
            expected = generate(alone)
        arguments = ["--model", str(model), "--blocks", "0:6", "--group-size", "2", "--throughput", "1000", *known]
        group = server_process(*arguments)
        assert group.ready["group"] == "2"
        (follower,) = [pid for pid in group.children() if b"multiprocessing-fork" in _command(pid)]
        with DistributedModel.from_pretrained(str(model), **client) as together:
            assert torch.equal(generate(together), expected)
            watcher = Watcher(3, lambda: os.kill(follower, signal.SIGKILL))
            assert torch.equal(generate(together, streamer=watcher), expected)
        wait_for(lambda: len(group.stdout) == 2, "the group's server has started again")
        assert "group=" not in group.stdout[1]
        assert f"process {follower}, a member of the group, has ended; this server has left the swarm" in group.stderr
        assert "Traceback" not in group.stderr
        assert group.terminate() == 0


def generate(model: DistributedModel, **options) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
