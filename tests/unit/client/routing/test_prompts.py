"""A prompt goes to servers that have computed its beginning, unless others are less busy by more than that saves."""

from __future__ import annotations

import pytest
import torch

from swarm_client.routing.own_load import SessionLoad, with_own_load
from swarm_client.routing.prompts import SentPrompts, pages_of, with_prompts
from swarm_client.routing.routing import Costs, Hop, fastest_chain
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import PAGE_TOKENS
from tests.unit.support import server_record

ALL = Span(0, 8)
VIEW = SwarmView([server_record(name, "0:8", tokens_per_s=10.0, forward_tokens_per_s=100.0) for name in "ab"])
COSTS = Costs({"a": 0.001, "b": 0.001})
PROMPT = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))


def test_pages_are_equal_up_to_where_prompts_differ() -> None:
    other = PROMPT.clone()
    other[3 * PAGE_TOKENS] += 1.0
    assert len(pages_of(PROMPT, "")) == 200 // PAGE_TOKENS
    assert [a == b for a, b in zip(pages_of(PROMPT, ""), pages_of(other, ""), strict=True)] == [True] * 3 + [False] * 3
    assert pages_of(PROMPT[: PAGE_TOKENS - 1], "") == ()
    assert not set(pages_of(PROMPT, "")) & set(pages_of(PROMPT, "polite"))


def test_a_server_knows_as_much_as_it_was_sent_and_forgets_it() -> None:
    sent, pages = SentPrompts(), pages_of(PROMPT, "")
    a, b, part = ("a", ALL), ("b", ALL), ("b", Span(0, 4))
    sent.add([a], pages[:2], 0.0)
    sent.add([b, part], pages[:4], 500.0)
    assert sent.num_known(pages, 500.0) == {a: 2 * PAGE_TOKENS, b: 4 * PAGE_TOKENS, part: 4 * PAGE_TOKENS}
    assert sent.num_known(pages, 700.0) == {b: 4 * PAGE_TOKENS, part: 4 * PAGE_TOKENS}
    assert sent.num_known(pages_of(PROMPT[1:], ""), 500.0) == {}
    sent.forget("b")
    assert sent.num_known(pages, 500.0) == {a: 2 * PAGE_TOKENS}


def test_a_server_with_later_pages_alone_knows_nothing() -> None:
    sent, pages = SentPrompts(), pages_of(PROMPT, "")
    sent.add([("a", ALL)], pages, 0.0)
    sent.add([("a", ALL)], pages[1:], 500.0)
    assert sent.num_known(pages, 700.0) == {}


def costs(num_known: dict[str, int], num_sessions_at_b: int = 0, span: Span = ALL) -> Costs:
    loads = [SessionLoad((Hop(VIEW.servers[1], ALL),), 0)] * num_sessions_at_b
    known = {(name, span): num for name, num in num_known.items()}
    return with_prompts(with_own_load(COSTS, VIEW, loads), VIEW, ALL, known)


@pytest.mark.parametrize(
    ("num_known", "num_sessions", "expected"),
    [({}, 1, "a"), ({"b": 128}, 1, "b"), ({"b": 128}, 3, "a"), ({"a": 128, "b": 128}, 1, "a"), ({"gone": 128}, 1, "a")],
)
def test_a_known_prompt_attracts_until_its_server_is_loaded(
    num_known: dict[str, int], num_sessions: int, expected: str
) -> None:
    """Computing 128 positions again takes 1.28 s, shared by 32 tokens: 0.04 s; each session costs 0.02 s a token."""
    (hop,) = fastest_chain(VIEW, ALL, costs(num_known, num_sessions))
    assert hop.server.peer_id == expected


def test_the_price_is_that_of_the_positions_to_repeat() -> None:
    block_s = costs({"a": 96, "b": 32}).block_s(VIEW.servers[1])
    assert block_s == pytest.approx((1 / 10 + 64 / 32 / 100) / 8)


def test_what_a_server_computed_for_other_blocks_does_not_count() -> None:
    assert costs({"b": 128}, span=Span(0, 4)).repeated_tokens == {}
    assert with_prompts(COSTS, VIEW, Span(8, 9), {("b", ALL): 128}).repeated_tokens == {}
