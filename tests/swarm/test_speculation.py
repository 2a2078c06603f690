"""Guesses do not change the text: greedy or sampled, in one row or several, whatever is right of them."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import Request
from swarm_client.drafts import lookup
from swarm_client.drafts.lookup import LookupDraft
from swarm_client.drafts.small_model import SmallModelDraft
from swarm_client.sessions.lane import Lane
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.generating import MOST_SHARING
from swarm_client.speculation.speculation import Speculation
from swarm_protocol.errors import PeerBusy, PeerUnavailable, SwarmError
from tests.drafts import Always, KnowingDraft
from tests.swarm.pair import Pair
from tests.swarm.test_batching import Heard
from tests.zoo import VOCAB

SPANS = ("0:3", "3:6")

NEW_TOKENS = 40
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20}


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def servers_with_nothing_else_to_do(monkeypatch) -> None:
    """However lately the sessions of other tests have ended."""
    monkeypatch.setattr(RemoteSession, "num_sharing", 1)


def written(pair: Pair, prompt: torch.Tensor, speculation: Speculation | None, **options) -> tuple[list[int], int]:
    """The text, and how many passes it took."""
    pair.remote.speculation = speculation or Speculation(None)
    torch.manual_seed(5)
    cache = pair.remote.new_cache()
    ids = pair.remote.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, past_key_values=cache, **options
    )
    assert cache.get_seq_length() == ids.shape[1] - 1 and cache.session.batch_size == 1
    cache.session.close()
    return ids[0].tolist(), cache.session.stats.steps


GUESSES = pytest.mark.promise("guesses of a draft change no token, greedy or sampled")


@pytest.mark.parametrize(
    ("chance", "rows", "options"),
    [
        pytest.param(0.7, 4, {"do_sample": False}, id="some-right-tree-greedy", marks=GUESSES),
        pytest.param(0.7, 1, SAMPLED, id="some-right-one-row-sampled", marks=GUESSES),
        pytest.param(0.0, 1, {"do_sample": False}, id="none-right-one-row-greedy"),
        pytest.param(0.0, 4, SAMPLED, id="none-right-tree-sampled"),
        pytest.param(1.0, 1, SAMPLED, id="all-right-one-row-sampled"),
    ],
)
def test_text_is_that_of_plain_generation(pair, prompt, options, rows, chance):
    plain, num_plain = written(pair, prompt, None, **options)
    assert num_plain == NEW_TOKENS
    speculation = Always(KnowingDraft([plain], chance), rows, 4)
    text, num_passes = written(pair, prompt, speculation, **options)
    assert text == plain
    if chance == 1:
        assert num_passes == 1 + -(-(NEW_TOKENS - 1) // 5)
    elif chance == 0:
        assert num_passes == NEW_TOKENS
    else:
        assert NEW_TOKENS / 5 < num_passes < 0.8 * NEW_TOKENS
    assert speculation.stats.right == NEW_TOKENS - num_passes


def test_draft_gets_what_was_written_and_the_states_it_was_predicted_from(pair, prompt):
    plain, _ = written(pair, prompt, None, do_sample=False)
    draft = KnowingDraft([plain], 0.7, num_hidden=3)
    text, _ = written(pair, prompt, Always(draft, 2, 3), do_sample=False)
    session = draft.sessions[0]
    assert session.ids == text == plain
    hidden = torch.cat(session.hidden)
    whole = pair.whole.model(torch.tensor([plain])).last_hidden_state[0, :-1]
    num_prompt = prompt.shape[1]
    assert torch.equal(hidden[: num_prompt - 2], torch.zeros_like(hidden[: num_prompt - 2]))
    torch.testing.assert_close(hidden[num_prompt - 2 :], whole[num_prompt - 3 :], atol=1e-4, rtol=1e-3)


def test_lookup_finds_what_repeats(pair, prompt, monkeypatch):
    monkeypatch.setattr(lookup, "SHORTEST", 1)  # a model of random weights repeats no more than that
    plain, _ = written(pair, prompt, None, do_sample=False)
    speculation = Always(LookupDraft(), 3, 4)
    text, num_passes = written(pair, prompt, speculation, do_sample=False)
    assert text == plain
    assert speculation.stats.guesses
    assert num_passes <= NEW_TOKENS


@pytest.mark.parametrize(
    ("options", "rows"), [({"do_sample": False}, 4), (SAMPLED, 1)], ids=["greedy-tree", "sampled-one-row"]
)
def test_model_as_its_own_draft_is_always_right(pair, prompt, options, rows):
    """Also when it samples: its guesses are drawn with the random numbers that choose the tokens."""
    plain, _ = written(pair, prompt, None, **options)
    draft = SmallModelDraft(pair.whole, "itself", VOCAB)
    text, num_passes = written(pair, prompt, Always(draft, rows, 4), **options)
    assert text == plain
    assert num_passes == 1 + -(-(NEW_TOKENS - 1) // 5)


@pytest.mark.parametrize(("error", "are_tried_again"), [(PeerBusy("full"), False), (PeerUnavailable("gone"), True)])
def test_rows_that_are_given_up_are_verified_in_one(pair, prompt, monkeypatch, error: SwarmError, are_tried_again):
    plain, _ = written(pair, prompt, None, do_sample=False)
    step, asked = Lane.step, []

    async def refusing(self: Lane, inputs, num_wanted, watched, may_wait, is_optional=False):
        is_first = len(inputs.hidden) > 1 and not any(rows > 1 for rows, _ in asked)
        asked.append((len(inputs.hidden), is_optional))
        if is_first:
            raise error
        return await step(self, inputs, num_wanted, watched, may_wait, is_optional)

    monkeypatch.setattr(Lane, "step", refusing)
    text, _ = written(pair, prompt, Always(KnowingDraft([plain], 0.7), 4, 3), do_sample=False)
    assert text == plain
    assert all(is_optional == (rows > 1) for rows, is_optional in asked)
    assert (sum(rows > 1 for rows, _ in asked) > 1) == are_tried_again


@GUESSES
def test_generation_of_the_loop_writes_what_it_writes_alone(pair, prompt):
    """Two in turn and then two at once, which are batched without guesses."""
    asked = [
        Request(tuple(prompt[0].tolist()), GenerationConfig(max_new_tokens=NEW_TOKENS, **options), seed=5)
        for options in ({"do_sample": False}, SAMPLED)
    ]
    expected = [written(pair, prompt, None, **options)[0] for options in ({"do_sample": False}, SAMPLED)]
    draft = KnowingDraft(expected, 0.6)
    pair.remote.speculation = speculation = Always(draft, 1, 3)
    with GenerationLoop(pair.remote) as loop:
        for request, text in zip(asked, expected, strict=True):
            heard = Heard()
            loop.submit(request, heard)
            assert heard.ids == text[prompt.shape[1] :]
        assert speculation.stats.right > 5
        assert all(text[: len(own.ids)] == own.ids for own, text in zip(draft.sessions, expected, strict=True))
        together = [Heard(), Heard()]
        for request, heard in zip(asked, together, strict=True):
            loop.submit(request, heard)
        assert [heard.ids for heard in together] == [text[prompt.shape[1] :] for text in expected]


def test_servers_that_others_use_verify_nothing(pair, prompt, monkeypatch):
    plain, _ = written(pair, prompt, None, do_sample=False)
    monkeypatch.setattr(RemoteSession, "num_sharing", MOST_SHARING + 1)
    speculation = Always(KnowingDraft([plain], 1.0), 1, 3)
    text, num_passes = written(pair, prompt, speculation, do_sample=False)
    assert text == plain and num_passes == NEW_TOKENS


def test_server_says_how_many_share_it(pair, prompt):
    cache = pair.remote.new_cache()
    pair.remote.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, past_key_values=cache)
    assert cache.session._lanes[0].chain.hops[-1].num_active >= 1
