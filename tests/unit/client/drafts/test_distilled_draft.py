"""A distilled draft guesses with its cache what its network computes of the whole text without one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import configuration_utils

from swarm_client.drafts.distilled.draft import SLACK, DistilledDraft, DistilledSession
from swarm_client.drafts.distilled.network import DraftNetwork, DraftShape

VOCAB, HIDDEN = 40, 32
SHAPE = DraftShape(VOCAB, HIDDEN, 16, 24, num_blocks=2, num_heads=2, num_kv_heads=1, context=64)


@pytest.fixture
def draft() -> DistilledDraft:
    torch.manual_seed(0)
    network = DraftNetwork(SHAPE).eval().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return DistilledDraft(network, nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False), "random", 0.5)


def text(count: int, seed: int = 1) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    return torch.randint(VOCAB, (count,), generator=generator).tolist(), hidden


@torch.no_grad()
def uncached(draft: DistilledDraft, ids: list[int], hidden: torch.Tensor, line: list[int]) -> torch.Tensor:
    """Logits after the text and after each token of the line, the whole computed anew for each of them."""
    logits = []
    for count in range(len(line) + 1):
        whole = torch.tensor([ids + line[:count]])
        output = draft.network(draft.embedding(whole), hidden[None])[0, -1:]
        logits.append(draft.head(output)[0])
        hidden = torch.cat([hidden, output])
    return torch.stack(logits)


def cached(session: DistilledSession, lines: list[list[int]]) -> torch.Tensor:
    """[lines, tokens of a line + 1, vocabulary]"""
    first = session.start(len(lines))
    steps = [session.step(torch.tensor(tokens)) for tokens in zip(*lines, strict=True)]
    return torch.stack([first.expand(len(lines), -1), *steps], 1)


def test_a_network_is_made_without_a_word_of_transformers(caplog, monkeypatch):
    """A warning about its config would come with every model that has a draft."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    configuration_utils.logger.warning_once.cache_clear()  # of what has been said once
    with caplog.at_level(logging.WARNING, "transformers"):
        DraftNetwork(SHAPE)
    assert caplog.messages == []


@pytest.mark.parametrize("num_lines", [1, 3])
def test_lines_are_what_the_network_computes_without_cache(draft, num_lines):
    ids, hidden = text(9)
    lines = [text(4, seed=10 + number)[0] for number in range(num_lines)]
    session = draft.begin()
    session.confirm(ids, hidden)
    expected = torch.stack([uncached(draft, ids, hidden, line) for line in lines])
    torch.testing.assert_close(cached(session, lines), expected)
    torch.testing.assert_close(cached(session, lines), expected)  # what was guessed is forgotten


@torch.no_grad()
def test_what_is_confirmed_replaces_what_was_guessed(draft):
    ids, hidden = text(20)
    session = draft.begin()
    for begin, end in ((0, 5), (5, 6), (6, 10), (10, 11), (11, 20)):
        session.confirm(ids[begin:end], hidden[begin:end])
        if end != 11:  # twice confirmed without a guess between
            cached(session, [[1, 2, 3], [4, 5, 6]])
    line = [7, 8, 9]
    torch.testing.assert_close(cached(session, [line])[0], uncached(draft, ids, hidden, line))


def test_sessions_of_a_draft_know_nothing_of_each_other(draft):
    ids, hidden = text(12)
    one, other = draft.begin(), draft.begin()
    one.confirm(ids, hidden)
    other.confirm(ids[:5], hidden[:5])
    first = one.start(1)
    other.start(2)
    other.step(torch.tensor([1, 2]))
    torch.testing.assert_close(one.step(torch.tensor([3])), uncached(draft, ids, hidden, [3])[1:])
    torch.testing.assert_close(first, uncached(draft, ids, hidden, [])[0])


def test_without_hidden_states_they_count_as_unknown(draft):
    ids, _ = text(6)
    session = draft.begin()
    session.confirm(ids, None)
    torch.testing.assert_close(session.start(1), uncached(draft, ids, torch.zeros(6, HIDDEN), [])[0])


def test_of_a_long_prompt_the_end_is_computed(draft):
    """Rotary embeddings see distances only: a text that begins where the draft's look back ends gives the same."""
    ids, hidden = text(300)
    session = draft.begin()
    session.confirm(ids, hidden)
    end = slice(-SHAPE.context, None)
    expected = uncached(draft, ids[end], hidden[end], [1, 2])
    torch.testing.assert_close(cached(session, [[1, 2]])[0], expected, atol=1e-4, rtol=1e-4)


def test_a_long_text_takes_no_more_room_than_its_end(draft):
    ids, hidden = text(300)
    session = draft.begin()
    for begin in range(0, 300, 3):
        session.confirm(ids[begin : begin + 3], hidden[begin : begin + 3])
        cached(session, [[1], [2]])
        assert session._cache.get_seq_length() <= SHAPE.context + SLACK + 2


def test_who_never_guesses_keeps_no_more_than_the_end_and_can_still_begin(draft):
    ids, hidden = text(5 * SHAPE.context)
    whole, written = draft.begin(), draft.begin()
    whole.confirm(ids, hidden)
    written.confirm(ids[: 2 * SHAPE.context], hidden[: 2 * SHAPE.context])
    for position in range(2 * SHAPE.context, len(ids)):
        written.confirm([ids[position]], hidden[position : position + 1])
    assert sum(len(kept) for kept in written._new_features) <= 2 * SHAPE.context
    torch.testing.assert_close(cached(written, [[5, 6]]), cached(whole, [[5, 6]]))
