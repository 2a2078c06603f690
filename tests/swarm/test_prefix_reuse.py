"""Prompts that begin alike are computed once, on every server, and nothing else is taken for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from swarm_client.core import background
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.admission.preemption import Claim, Preemption
from swarm_server.engine.engine import Engine
from tests.swarm.pair import NEW_TOKENS, Pair, connected, random_ids, started
from tests.swarm.waiting import wait_for

SPANS = ("0:3", "3:6")
SHARED, REST = 5 * PAGE_TOKENS, 21
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


@pytest.fixture
def computed(monkeypatch) -> dict[Span, int]:
    """How many positions of prompts go through each server's blocks, all rows together."""
    counts: dict[Span, int] = defaultdict(int)
    run_part = Engine._run_part

    def counted(engine: Engine, blocks: Span, batch, hidden):
        for one in hidden:
            if one.shape[1] > 1:
                counts[blocks] += one.shape[0] * one.shape[1]
        return run_part(engine, blocks, batch, hidden)

    monkeypatch.setattr(Engine, "_run_part", counted)
    return counts


def prompts(number: int, batch_size: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """Which differ behind ``SHARED`` tokens."""
    shared = random_ids(batch_size, SHARED, seed)
    return [torch.cat([shared, random_ids(batch_size, REST, seed=1000 + i)], 1) for i in range(number)]


def generated(pair: Pair, ids: torch.Tensor, **options) -> None:
    """Generates, and checks the tokens."""
    whole, remote = pair.both(ids, **(OPTIONS | options))
    assert torch.equal(remote, whole)


def everywhere(num_positions: int) -> dict[Span, int]:
    return {Span.parse(span): num_positions for span in SPANS}


async def preempt(claim: Claim) -> None:
    claim.preempt()


@pytest.mark.parametrize(
    "batch_size",
    [pytest.param(1, marks=pytest.mark.promise("a server computes a beginning that prompts share once")), 2],
)
def test_only_the_rest_is_computed(pair, computed, batch_size):
    first, second, third = prompts(3, batch_size, seed=batch_size)
    generated(pair, first)
    assert computed == everywhere(batch_size * (SHARED + REST))
    for again in (second, third):
        computed.clear()
        generated(pair, again)
        assert computed == everywhere(batch_size * REST)


def test_a_prompt_that_was_there_as_a_whole(pair, computed):
    """Only what comes out is computed again: the last page."""
    (prompt,) = prompts(1, seed=10)
    for _ in range(2):
        computed.clear()
        generated(pair, prompt[:, :SHARED])
    assert computed[Span(0, 3)] == 0 and computed[Span(3, 6)] == PAGE_TOKENS


@pytest.mark.parametrize("sharing", ["none", "own", "all"])
def test_two_clients_share_only_if_they_may(tmp_path, computed, sharing):
    """Each shares with itself, also after it was away, unless the server shares nothing."""
    whole_prompt, rest = {Span(0, 6): SHARED + REST}, {Span(0, 6): REST}
    own = whole_prompt if sharing == "none" else rest
    first, second, third = prompts(3, seed=60)
    with started(tmp_path, "0:6", prefix_cache=sharing) as pair, connected(pair.servers) as other:
        stranger = replace(pair, remote=other)
        for client, prompt, expected in (
            (pair, first, whole_prompt),
            (stranger, second, rest if sharing == "all" else whole_prompt),
            (stranger, third, own),
            (pair, third, own),
        ):
            computed.clear()
            generated(client, prompt)
            assert computed == expected


def test_a_session_that_is_preempted_is_replayed_from_its_own_pages(tmp_path, computed, monkeypatch):
    """Whatever others may see: the key of a client stays the same from one session to the next."""
    claims: list[Claim] = []
    add = Preemption.add
    monkeypatch.setattr(Preemption, "add", lambda self, claim: (claims.append(claim), add(self, claim))[1])
    (talk,) = prompts(1, seed=61)
    with started(tmp_path, "0:6", prefix_cache="own") as pair:
        cache = DynamicCache()
        talk = pair.remote.generate(talk, past_key_values=cache, **OPTIONS)
        computed.clear()
        background.run(preempt(claims[0]))
        wait_for(lambda: claims[0].closed, "the session is preempted")
        longer = torch.cat([talk, random_ids(1, 3, seed=0)], 1)
        result = pair.remote.generate(longer, past_key_values=cache, **OPTIONS)
        assert torch.equal(result, pair.whole.generate(longer, **OPTIONS))
        assert len(claims) == 2 and computed[Span(0, 6)] < SHARED
