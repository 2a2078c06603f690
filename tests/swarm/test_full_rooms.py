"""Servers without room for another session: it waits its turn, and those that have begun all finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client.core.events import Event, Waiting
from swarm_client.model.cache import RemoteCache
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, ends_only_at_its_length, random_ids
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

NUM_SESSIONS, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 20
LENGTH = PROMPT_TOKENS + NEW_TOKENS - 1  # positions whose keys and values a session keeps
ROOM = 48  # positions of a server of three blocks; one that keeps its outputs takes a third more


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", directory)
    return directory


@pytest.fixture(scope="module")
def whole(checkpoint) -> PreTrainedModel:
    return ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))


@pytest.fixture(scope="module")
def pair_of_servers(checkpoint) -> Iterator[InProcessServers]:
    with InProcessServers(checkpoint, cache_tokens=ROOM) as servers:
        servers.start("0:3", "3:6")
        yield servers


@pytest.fixture
def servers(pair_of_servers) -> Iterator[InProcessServers]:
    yield pair_of_servers
    pair_of_servers.wait_until_all_room_is_free()


@pytest.fixture
def connect(servers) -> Iterator[Callable[..., PreTrainedModel]]:
    with ExitStack() as models:
        yield lambda **options: models.enter_context(connected(servers, **options))


def continued(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int = NEW_TOKENS, **options) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **options)


def test_all_sessions_finish_that_have_begun_in_a_room_for_fewer(connect, whole):
    """Nobody has asked for room in advance: eight of them need five times the room there is."""
    model = connect(wait_timeout_s=300)
    prompts = [random_ids(1, PROMPT_TOKENS, seed) for seed in range(NUM_SESSIONS)]
    caches = [model.new_cache() for _ in prompts]

    def finish(prompt: torch.Tensor, cache: RemoteCache) -> torch.Tensor:
        result = continued(model, prompt, past_key_values=cache)
        cache.session.close()
        return result

    with ThreadPoolExecutor(NUM_SESSIONS) as threads:
        results = list(threads.map(finish, prompts, caches))
    for prompt, result in zip(prompts, results, strict=True):
        assert torch.equal(result, continued(whole, prompt))
    assert any(cache.session.stats.replayed_tokens for cache in caches)  # admitted, preempted and replayed


class Waits:
    """What a client says while it waits."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def for_room(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Waiting) and "no room" in event.reason]


def test_a_generation_waits_for_room(connect, whole):
    """And says so; it goes on once somebody else has closed a session."""
    waits, prompt = Waits(), random_ids(1, PROMPT_TOKENS, 1)
    other, model = connect(), connect(wait_timeout_s=300, on_event=waits.events.append)
    chat = other.new_cache(ROOM * 3 // 4)
    continued(other, prompt, 2, past_key_values=chat)
    with ThreadPoolExecutor() as thread:
        generation = thread.submit(continued, model, prompt)
        wait_for(lambda: waits.for_room, "the client says that it waits")
        assert not generation.done()
        chat.session.close()
        assert torch.equal(generation.result(), continued(whole, prompt))
