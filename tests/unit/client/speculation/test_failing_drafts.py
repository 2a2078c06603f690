"""Drafts that fail: the text goes on without guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from swarm_client.drafts.small_model import SmallModelDraft
from swarm_client.speculation.choosing import Verified
from swarm_client.speculation.draft import Draft, DraftSession, Guesses
from swarm_client.speculation.policy import DraftPlan
from tests.drafts import Always

VOCAB, MAX_POSITIONS = 16, 8


class Ranking:
    """As the logits are."""

    def __call__(self, logits: torch.Tensor, _depth: int) -> torch.Tensor:
        return logits


class Failing(Draft):
    """Fails when it is called for the so manieth time."""

    name, acceptance = "failing", 0.5

    def __init__(self, at: int) -> None:
        self.at, self.num_calls = at, 0

    def begin(self) -> DraftSession:
        return FailingSession(self)


class FailingSession(DraftSession):
    def __init__(self, draft: Failing) -> None:
        self._draft = draft

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._called()

    def guess(self, plan: DraftPlan, ranking: Any) -> Guesses:
        self._called()
        return Guesses(torch.tensor([[1]]))

    def _called(self) -> None:
        self._draft.num_calls += 1
        if self._draft.num_calls == self._draft.at:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("at", range(1, 6))
def test_a_draft_that_fails_is_asked_no_more(at: int, caplog: pytest.LogCaptureFixture) -> None:
    draft: Any = Failing(at)
    guessing = Always(draft, 1, 3).begin([1, 2], Ranking())  # type: ignore[arg-type]
    assert guessing is not None
    guessing.begin(3, None)  # the first call
    lengths = []
    for _ in range(3):
        lengths.append(guessing.next(5, most_rows=1).length)
        guessing.verified(Verified([4], 0), None)
    guessing.end()
    assert draft.num_calls == at
    assert lengths == [int(2 * number + 2 < at) for number in range(3)]
    assert "the draft has failed" in caplog.text and "out of memory" in caplog.text


def test_a_small_model_guesses_no_further_than_its_positions_go() -> None:
    config = GPT2Config(n_positions=MAX_POSITIONS, n_embd=8, n_layer=1, n_head=1, vocab_size=VOCAB)
    draft = SmallModelDraft(GPT2LMHeadModel(config).eval(), "small", VOCAB)
    for num_known in range(1, MAX_POSITIONS + 3):
        session = draft.begin()
        session.confirm(list(range(num_known)), None)
        length = session.guess(DraftPlan(1, 5), Ranking()).length  # type: ignore[arg-type]
        assert length == max(0, min(5, MAX_POSITIONS - num_known))
