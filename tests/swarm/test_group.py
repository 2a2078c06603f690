"""Several processes as one server: clients see one, and lose one when a member dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
import torch

from swarm_client import DistributedModel
from swarm_server.group import links, members
from swarm_server.group.group_key import read_group_key
from swarm_server.group.links import GroupEnded
from swarm_server.node import hosting
from swarm_server.node.addresses import free_port
from swarm_server.placement import slow_follower
from tests.swarm.harness import InProcessServers, Watcher
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import DEADLINE_S, wait_for
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


@pytest.mark.slow
def test_a_member_slowed_in_mid_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader leaves the swarm to form the group without it, and the other server goes on with the same tokens."""
    save_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=320)
    monkeypatch.setattr(members, "_WINDOW_S", inf)
    with InProcessServers(tmp_path) as servers:
        servers.start("0:6", quant="int8", throughput=1.0)
        client = {"initial_peers": servers.initial_peers, "swarm": servers.swarm}
        with DistributedModel.from_pretrained(str(tmp_path), **client) as alone:
            expected = generate(alone, 40)
        (group,) = servers.start("0:6", quant="int8", throughput=1000.0, group_size=2)
        ended = servers._running.pop(group)
        (follower,) = [each for each in multiprocessing.active_children() if each.name == "group-1"]

        def hinder() -> None:
            while not ended.done():
                for number, pause_s in ((signal.SIGSTOP, 0.05), (signal.SIGCONT, 0.002)):
                    with suppress(ProcessLookupError):  # the leader has ended it
                        os.kill(follower.pid, number)
                    time.sleep(pause_s)

        hindering = threading.Thread(target=hinder)

        def slow_down() -> None:
            monkeypatch.setattr(members, "_WINDOW_S", 0.0)
            monkeypatch.setattr(slow_follower, "BUSY_S", 0.001)
            monkeypatch.setattr(hosting, "_WATCH_GROUP_S", 0.01)
            hindering.start()

        with DistributedModel.from_pretrained(str(tmp_path), **client) as together:
            assert torch.equal(generate(together, 40, streamer=Watcher(3, slow_down)), expected)
        with pytest.raises(GroupEnded, match=f"process {follower.pid}, a member of the group, makes it slow"):
            ended.result(DEADLINE_S)
        hindering.join()


@pytest.mark.slow
def test_a_group_over_tcp_whose_followers_are_killed_and_stopped_in_mid_generation(
    server_process, tmp_path: Path
) -> None:
    """A follower waits for leaders, one that would not pay is refused, and clients lose nothing with a follower.

    The group forms again with members that come.
    """
    model, key, wrong = tmp_path / "model", tmp_path / "group.key", tmp_path / "wrong.key"
    save_checkpoint("llama", model, hidden_size=128, intermediate_size=320)
    read_group_key(key, create=True), read_group_key(wrong, create=True)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    following = ["--model", str(model), "--follow", address, "--group-key"]
    follower = server_process(*following, str(key), wait=False)
    wait_for(lambda: f"no leader of a group answers at {address}" in follower.stderr, "the follower waits")
    with InProcessServers(model) as servers:
        servers.start("0:6", quant="int8", throughput=1.0)
        client = {"initial_peers": servers.initial_peers, "swarm": servers.swarm}
        with DistributedModel.from_pretrained(str(model), **client) as alone:
            expected = generate(alone)
        leading = ["--model", str(model), "--blocks", "0:6", "--group-size", "2", "--throughput", "1000", "--swarm"]
        leading += [servers.swarm, "--initial-peers", *servers.initial_peers]
        leading += ["--group-listen", address, "--group-key", str(key)]
        refused = server_process(*leading, wait=False)  # an exchange takes longer than one of these small blocks
        wait_for(lambda: "the group would reach only 0." in refused.stderr, "the group is refused")
        wait_for(lambda: "the group has ended; this follower waits" in follower.stderr, "the follower is free")
        group = server_process(*leading, "--group-always")
        assert group.ready["group"] == "2" and "the group reaches 0." in group.stderr
        with DistributedModel.from_pretrained(str(model), **client) as together:
            assert torch.equal(generate(together), expected)
            watcher = Watcher(3, follower.kill)
            assert torch.equal(generate(together, streamer=watcher), expected)
        wait_for(lambda: len(group.stdout) == 2, "the group's server has started again")
        assert "group=" not in group.stdout[1]
        assert "this server has left the swarm, and starts again with the members that are there" in group.stderr
        stranger = server_process(*following, str(wrong), wait=False)
        wait_for(lambda: f"cannot follow {address}: the other end has another group key" in stranger.stderr, "refusal")
        assert "is not let into the group" in group.stderr
        follower = server_process(*following, str(key), wait=False)
        wait_for(lambda: len(group.stdout) == 3, "the group has formed again with the member that has come")
        assert "group=2" in group.stdout[2] and "the group has another member or leader" in group.stderr
        wait_for(lambda: max(record.tokens_per_s for record in servers.records()) > 1, "the group is announced")
        with DistributedModel.from_pretrained(str(model), **client) as together:
            watcher = Watcher(3, lambda: os.kill(follower.pid, signal.SIGSTOP))
            assert torch.equal(generate(together, streamer=watcher), expected)
        wait_for(lambda: len(group.stdout) == 4, "the server goes on without the member that has been stopped")
        assert "group=" not in group.stdout[3] and "has not answered for 10 seconds" in group.stderr
        os.kill(follower.pid, signal.SIGCONT)
        wait_for(lambda: len(group.stdout) == 5, "the member is there again")
        assert group.terminate() == 0
        for process in (refused, group, stranger, follower):
            assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_members_of_a_named_group_find_each_other_and_another_leader(server_process, tmp_path: Path) -> None:
    """One leads, and the other follows; when the leader is killed in mid-generation, the other takes its place."""
    model, key = tmp_path / "model", tmp_path / "group.key"
    save_checkpoint("llama", model, hidden_size=128, intermediate_size=320)
    read_group_key(key, create=True)
    with InProcessServers(model) as servers:
        servers.start("0:6", quant="int8", throughput=1.0)
        client = {"initial_peers": servers.initial_peers, "swarm": servers.swarm}
        with DistributedModel.from_pretrained(str(model), **client) as alone:
            expected = generate(alone)
        member = ["--model", str(model), "--blocks", "0:6", "--group", "lab", "--group-key", str(key), "--group-always"]
        member += ["--throughput", "1000", "--swarm", servers.swarm, "--initial-peers", *servers.initial_peers]
        members = [server_process(*member, wait=False) for _ in range(2)]
        leader = wait_for(lambda: next(filter(_leads, members), None), "one leads")
        (other,) = [each for each in members if each is not leader]
        assert other.stdout[0].startswith("following leader=127.0.0.1:")
        with DistributedModel.from_pretrained(str(model), **client) as together:
            assert torch.equal(generate(together, streamer=Watcher(3, leader.kill)), expected)
        wait_for(lambda: other.stdout[-1].startswith("ready"), "the other serves")
        third = server_process(*member, wait=False)
        wait_for(lambda: _leads(other), "the group has two members again")
        assert third.stdout[0].startswith("following leader=127.0.0.1:")
        assert other.terminate() == 0
        for process in (*members, third):
            assert "Traceback" not in process.stderr


def _leads(process: ServerProcess) -> bool:
    return any(line.startswith("ready") and " group=2 " in line for line in process.stdout)


def generate(model: DistributedModel, num_tokens: int = 12, **options) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(PROMPT, max_new_tokens=num_tokens, do_sample=False, **options)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
