"""Several completions of one prompt: servers compute the prompt once, and no row whose text has ended."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.engine.engine import Engine
from tests.swarm.pair import Pair, random_ids
from tests.zoo import PAD

SPANS = ("0:3", "3:6")

ROWS, NEW = 6, 20
PROMPT = random_ids(1, PAGE_TOKENS + 8, seed=0)  # a page of the prefix cache, and more


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, int]]:
    """Rows and new positions of each step of the server of the first blocks."""
    shapes: list[tuple[int, int]] = []
    run_part = Engine._run_part

    def counted(engine: Engine, blocks, batch, hidden):
        if blocks.start == 0:
            shapes.extend(tuple(one.shape[:2]) for one in hidden)
        return run_part(engine, blocks, batch, hidden)

    monkeypatch.setattr(Engine, "_run_part", counted)
    return shapes


def completed(pair: Pair, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> torch.Tensor:
    """Sample from both models with the same random numbers; check that the tokens are equal, and return them."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": True, "max_new_tokens": NEW, "pad_token_id": PAD, "attention_mask": mask, **options}
    whole, remote = pair.both(ids, **options)
    assert torch.equal(remote, whole)
    return whole


def ends(pair: Pair) -> list[int]:
    """Return tokens that end about half of the texts early."""
    free = completed(pair, PROMPT.expand(ROWS, -1))
    return free[: ROWS // 2, PROMPT.shape[1] + 3].tolist()


def test_the_prompt_is_computed_once_and_ended_texts_are_not_continued(pair, computed):
    stops = ends(pair)
    computed.clear()
    texts = completed(pair, PROMPT.expand(ROWS, -1), eos_token_id=stops)
    new = texts[:, PROMPT.shape[1] :]
    lengths = [next((place + 1 for place, token in enumerate(row) if token in stops), NEW) for row in new.tolist()]
    assert len(set(lengths)) > 1
    assert [rows for rows, num_tokens in computed if num_tokens > 1] == [1]
    assert [rows for rows, num_tokens in computed if num_tokens == 1] == [
        sum(length > step for length in lengths) for step in range(1, max(lengths))
    ]


def test_different_prompts_with_padding_are_computed_once_each(pair, computed):
    ids = torch.cat([PROMPT, random_ids(1, PROMPT.shape[1], seed=1)])
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = PAD, 0
    completed(pair, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), eos_token_id=ends(pair))
    assert max(rows for rows, num_tokens in computed if num_tokens > 1) == 2


def test_beams_begin_as_one_row(pair, computed):
    completed(pair, PROMPT, num_beams=4, do_sample=False)
    assert [rows for rows, num_tokens in computed if num_tokens > 1] == [1]


@pytest.mark.parametrize("place", [3, 5])  # between the blocks, and after the last one
def test_a_hook_on_a_block_sees_all_rows_until_the_last_text_ends(pair, place):
    stops, seen = ends(pair), []

    def keep(_module, _inputs, output):
        seen.append(output.clone())

    hooks = [model.model.layers[place].register_forward_hook(keep) for model in (pair.whole, pair.remote)]
    try:
        completed(pair, PROMPT.expand(ROWS, -1), eos_token_id=stops)
    finally:
        for hook in hooks:
            hook.remove()
    num_passes = len(seen) // 2
    assert num_passes > 1
    for whole, remote in zip(seen[:num_passes], seen[num_passes:], strict=True):
        torch.testing.assert_close(remote, whole, atol=1e-4, rtol=1e-4)


def test_hidden_states_may_be_asked_for_although_texts_end_early(pair):
    completed(pair, PROMPT.expand(ROWS, -1), eos_token_id=ends(pair), output_hidden_states=True)
