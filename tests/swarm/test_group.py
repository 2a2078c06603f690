"""Several processes as one server: clients see one, and lose one when a member dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from swarm_client import DistributedModel
from swarm_server.group import links
from swarm_server.group.group_key import read_group_key
from swarm_server.group.links import GroupEnded
from swarm_server.group.members import MemberWatch
from swarm_server.node import hosting
from swarm_server.node.addresses import free_port
from tests.swarm.harness import InProcessServers, Watcher
from tests.swarm.pair import connected
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import VOCAB, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(links.library() is None, reason="no compiled kernel")]

MOST = 40  # new tokens
PROMPT = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "model"
    save_checkpoint("llama", directory, hidden_size=128, intermediate_size=320)
    return directory


@pytest.fixture(scope="module")
def expected(model) -> torch.Tensor:
    """What a server alone writes."""
    with InProcessServers(model, memory_dht=True) as servers:
        servers.start("0:6", quant="int8")
        with connected(servers) as alone:
            return generate(alone, MOST)


@dataclass
class Swarm:
    """A swarm with a slow server, which goes on when a group fails."""

    servers: InProcessServers
    expected: torch.Tensor

    @property
    def flags(self) -> list[str]:
        """Those of servers of a group, which is fast."""
        known = ["--model", str(self.servers.model), "--blocks", "0:6", "--throughput", "1000"]
        return [*known, "--swarm", self.servers.swarm, "--initial-peers", *self.servers.initial_peers]

    def assert_generates(self, *moments: Callable[[], object] | None, num_tokens: int = 12) -> None:
        """A client writes what a server alone writes once for each moment, which is after the third token."""
        known = {"initial_peers": self.servers.initial_peers, "swarm": self.servers.swarm}
        with DistributedModel.from_pretrained(str(self.servers.model), **known) as together:
            for moment in moments:
                found = generate(together, num_tokens, streamer=None if moment is None else Watcher(3, moment))
                assert torch.equal(found, self.expected[:, : found.shape[1]])


@pytest.fixture
def swarm(model, expected) -> Iterator[Swarm]:
    with InProcessServers(model) as servers:
        servers.start("0:6", quant="int8", throughput=1.0)
        yield Swarm(servers, expected)


def test_a_member_killed_in_mid_generation(swarm: Swarm, server_process) -> None:
    """The other server goes on with the same tokens, and the group's server is there again, alone."""
    group = server_process(*swarm.flags, "--group-size", "2")
    assert group.ready["group"] == "2"
    (follower,) = [pid for pid in group.children() if b"multiprocessing-fork" in _command(pid)]
    swarm.assert_generates(None, lambda: os.kill(follower, signal.SIGKILL))
    wait_for(lambda: len(group.stdout) == 2, "the group's server has started again")
    assert "group=" not in group.stdout[1]
    assert f"process {follower}, a member of the group, has ended; this server has left the swarm" in group.stderr
    assert "Traceback" not in group.stderr
    assert group.terminate() == 0


def test_a_member_found_slow_in_mid_generation(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader leaves the swarm to form the group without it, and the other server goes on with the same tokens."""
    monkeypatch.setattr(hosting, "_WATCH_GROUP_S", 0.01)
    (group,) = swarm.servers.start("0:6", quant="int8", throughput=1000.0, group_size=2)
    ended = swarm.servers._running.pop(group)
    (follower,) = [each for each in multiprocessing.active_children() if each.name == "group-1"]
    swarm.assert_generates(lambda: monkeypatch.setattr(MemberWatch, "look", lambda _watch: 1), num_tokens=MOST)
    with pytest.raises(GroupEnded, match=f"process {follower.pid}, a member of the group, makes it slow"):
        ended.result(DEADLINE_S)


def test_a_group_over_tcp_whose_followers_are_killed_and_stopped_in_mid_generation(
    swarm: Swarm, server_process, tmp_path: Path
) -> None:
    """A follower waits for leaders, one that would not pay is refused, and clients lose nothing with a follower.

    The group forms again with members that come.
    """
    key, wrong = tmp_path / "group.key", tmp_path / "wrong.key"
    read_group_key(key, create=True), read_group_key(wrong, create=True)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    following = ["--model", str(swarm.servers.model), "--follow", address, "--group-key"]
    follower = server_process(*following, str(key), wait=False)
    wait_for(lambda: f"no leader of a group answers at {address}" in follower.stderr, "the follower waits")
    leading = [*swarm.flags, "--group-size", "2", "--group-listen", address, "--group-key", str(key)]
    refused = server_process(*leading, wait=False)  # an exchange takes longer than one of these small blocks
    wait_for(lambda: "the group would reach only 0." in refused.stderr, "the group is refused")
    wait_for(lambda: "the group has ended; this follower waits" in follower.stderr, "the follower is free")
    group = server_process(*leading, "--group-always")
    assert group.ready["group"] == "2" and "the group reaches 0." in group.stderr
    swarm.assert_generates(None, follower.kill)
    wait_for(lambda: len(group.stdout) == 2, "the group's server has started again")
    assert "group=" not in group.stdout[1]
    assert "this server has left the swarm, and starts again with the members that are there" in group.stderr
    stranger = server_process(*following, str(wrong), wait=False)
    wait_for(lambda: f"cannot follow {address}: the other end has another group key" in stranger.stderr, "refusal")
    assert "is not let into the group" in group.stderr
    follower = server_process(*following, str(key), wait=False)
    wait_for(lambda: len(group.stdout) == 3, "the group has formed again with the member that has come")
    assert "group=2" in group.stdout[2] and "the group has another member or leader" in group.stderr
    wait_for(lambda: max(record.tokens_per_s for record in swarm.servers.records()) > 1, "the group is announced")
    swarm.assert_generates(lambda: os.kill(follower.pid, signal.SIGSTOP))
    wait_for(lambda: len(group.stdout) == 4, "the server goes on without the member that has been stopped")
    assert "group=" not in group.stdout[3] and "has not answered for 10 seconds" in group.stderr
    os.kill(follower.pid, signal.SIGCONT)
    wait_for(lambda: len(group.stdout) == 5, "the member is there again")
    assert group.terminate() == 0
    for process in (refused, group, stranger, follower):
        assert "Traceback" not in process.stderr


def test_members_of_a_named_group_find_each_other_and_another_leader(
    swarm: Swarm, server_process, tmp_path: Path
) -> None:
    """One leads, and the other follows; when the leader is killed in mid-generation, the other takes its place."""
    key = tmp_path / "group.key"
    read_group_key(key, create=True)
    member = [*swarm.flags, "--group", "lab", "--group-key", str(key), "--group-always"]
    members = [server_process(*member, wait=False) for _ in range(2)]
    leader = wait_for(lambda: next(filter(_leads, members), None), "one leads")
    (other,) = [each for each in members if each is not leader]
    assert other.stdout[0].startswith("following leader=127.0.0.1:")
    swarm.assert_generates(leader.kill)
    wait_for(lambda: other.stdout[-1].startswith("ready"), "the other serves")
    third = server_process(*member, wait=False)
    wait_for(lambda: _leads(other), "the group has two members again")
    assert third.stdout[0].startswith("following leader=127.0.0.1:")
    assert other.terminate() == 0
    for process in (*members, third):
        assert "Traceback" not in process.stderr


def _leads(process: ServerProcess) -> bool:
    return any(line.startswith("ready") and " group=2 " in line for line in process.stdout)


def generate(model: DistributedModel, num_tokens: int, **options) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(PROMPT, max_new_tokens=num_tokens, do_sample=False, **options)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
