"""More chats than a server's KV cache has room for: idle ones wait on disk, and nothing of them is computed again."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from swarm_server.admission import pressure
from swarm_server.sessions.host import SessionManager
from tests.swarm.pair import NEW_TOKENS, random_ids, started
from tests.swarm.waiting import wait_for

PROMPT, NUM_CHATS, NUM_TURNS = 50, 3, 3
ROOM = 2 * (PROMPT + NUM_TURNS * (NEW_TOKENS + 3)) - 1  # less than two chats take in the end
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[SessionManager]:
    """The sessions of each server. They are idle at once."""
    made: list[SessionManager] = []
    init = SessionManager.__init__

    def initialized(self: SessionManager, *args: object) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(SessionManager, "__init__", initialized)
    monkeypatch.setattr(pressure, "IDLE_S", 0.0)
    return made


@pytest.mark.parametrize(
    "prefix_cache",
    [
        pytest.param("own", marks=pytest.mark.promise("idle chats leave a full KV cache, and go on as they were")),
        "none",
    ],
)
def test_chats_take_turns(tmp_path, hosts: list[SessionManager], prefix_cache: str) -> None:
    options = {"kv_offload_disk_bytes": 1 << 26, "kv_offload_directory": tmp_path / "kv", "cache_tokens": ROOM}
    with started(tmp_path / "model", "0:3", "3:6", prefix_cache=prefix_cache, **options) as pair:
        talks = [random_ids(1, PROMPT, seed=number) for number in range(NUM_CHATS)]
        caches = [DynamicCache() for _ in talks]
        for turn in range(NUM_TURNS):
            for number, cache in enumerate(caches):
                answer = pair.remote.generate(talks[number], past_key_values=cache, **OPTIONS)
                assert torch.equal(answer, pair.whole.generate(talks[number], **OPTIONS))
                talks[number] = torch.cat([answer, random_ids(1, 3, seed=10 * turn + number)], 1)
        num_positions = sum(talk.shape[1] - 3 - 1 for talk in talks)
        for host in hosts:
            counters = host.services.counters
            assert not counters.sessions["replacement"], "no chat was preempted"
            assert counters.parked["resumed"] >= NUM_CHATS
            assert counters.positions["prefill"] + counters.positions["decode"] == num_positions
        del caches, cache
        for host in hosts:
            services = host.services
            wait_for(lambda host=host: not host.num_sessions, "all sessions have ended")
            wait_for(lambda budget=services.budget: budget.bytes_left == budget.capacity_bytes, "all room is free")
            left = any(services.offload.used_bytes.values())
            assert left == (prefix_cache == "own"), "only what the next prompts may share stays on disk"
