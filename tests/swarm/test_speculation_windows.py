"""Sliding windows forget what is settled, whether there are guesses or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.speculation import Speculation
from swarm_server.kv.kv_rows import KvGroup
from tests.drafts import Always, KnowingDraft
from tests.swarm.pair import Pair, random_ids, started
from tests.zoo import SLIDING

NEW_TOKENS = 260
SOME_PASSES = 40  # after which windows have forgotten what is settled
PROMPT = random_ids(1, 7, seed=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    config = {"max_position_embeddings": 2 * NEW_TOKENS}
    with started(tmp_path_factory.mktemp("sliding"), "0:6", name="mistral-sliding", config=config) as pair:
        yield pair


@pytest.fixture(scope="module")
def text(pair) -> list[int]:
    ids = pair.whole.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW_TOKENS)
    return ids[0].tolist()


@pytest.fixture
def kept(monkeypatch) -> Iterator[list[int]]:
    """How many positions the blocks of servers kept of a row, before each step: few more than without guesses."""
    counts, excess = [], KvGroup.excess

    def spy(self: KvGroup, length: int, num_kept: int, num_new: int, settled: int) -> int:
        counts.append(num_kept)
        return excess(self, length, num_kept, num_new, settled)

    monkeypatch.setattr(KvGroup, "excess", spy)
    monkeypatch.setattr(RemoteSession, "num_sharing", 1)  # however lately the sessions of other tests have ended
    yield counts
    most = KvGroup((), SLIDING).most
    assert max(counts) <= most + SOME_PASSES < NEW_TOKENS


def generate(pair: Pair, cache, ids: torch.Tensor, new_tokens: int) -> list[int]:
    mask = torch.ones_like(ids)
    output = pair.remote.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, past_key_values=cache)
    return output[0].tolist()


@pytest.mark.parametrize("num_known", [0, 20], ids=["nothing-is-guessed", "guessed-at-first"])
def test_a_text_takes_no_more_room_than_without_a_draft(pair, text, kept, num_known):
    pair.remote.speculation = Always(KnowingDraft([text[:num_known]], 0.7), 1, SLIDING)
    assert generate(pair, pair.remote.new_cache(), PROMPT, NEW_TOKENS) == text


def test_what_was_forgotten_is_not_needed_where_guesses_begin_late(pair, text, kept):
    """They are wrong each time, so that windows are cropped."""
    pair.remote.speculation = Speculation(None)
    cache = pair.remote.new_cache()
    begun = generate(pair, cache, PROMPT, NEW_TOKENS - 20)
    pair.remote.speculation = speculation = Always(KnowingDraft([text], 0.0), 4, SLIDING - 2)
    assert generate(pair, cache, torch.tensor([begun]), 20) == text
    assert speculation.stats.guesses and not speculation.stats.right
