"""The draft that ships with the shipped model: what it guesses of text that neither of them was trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from swarm_client.drafts.distilled.draft import DistilledDraft, load_distilled, own_draft
from swarm_client.drafts.lookup import LookupDraft
from swarm_client.drafts.opening import open_speculation
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import CheckpointError
from tests.zoo import VOCAB, save_checkpoint

PATH = Path(locate(DEFAULT_MODEL))
NUM_PROMPTS, PROMPT, NEW, GUESSES = 12, 64, 48, 4
LEAST_ACCEPTANCE, LEAST_IN_A_ROW = 0.45, 0.95  # of first guesses; of each round. Measured: 0.51, 1.13


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(model) -> DistilledDraft:
    return own_draft(model)


@pytest.fixture(scope="module")
def texts(model) -> tuple[torch.Tensor, torch.Tensor]:
    """[NUM_PROMPTS, PROMPT + NEW] tokens, of which the model has written the last, and the states it did so from."""
    ids = AutoTokenizer.from_pretrained(PATH)((PATH / "heldout.txt").read_text(), verbose=False)["input_ids"]
    starts = torch.linspace(1, len(ids) - PROMPT, NUM_PROMPTS).long().tolist()
    prompts = torch.tensor([[ids[0], *ids[start : start + PROMPT - 1]] for start in starts])
    with torch.inference_mode():
        written = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        hidden = model.model(written, use_cache=False).last_hidden_state
    return written, torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def rounds(draft: DistilledDraft, ids: list[int], hidden: torch.Tensor) -> tuple[list[bool], list[int]]:
    """Whether each first guess was right, and how many of each round's."""
    first, in_a_row, session = [], [], draft.begin()
    hidden = hidden.clone()
    hidden[:PROMPT] = 0  # a client has that of the last position of a prompt
    confirmed, known = 0, PROMPT + 1
    while known < len(ids) - GUESSES:
        session.confirm(ids[confirmed:known], hidden[confirmed:known])
        guess, right = int(session.start(1).argmax()), 0
        first.append(guess == ids[known])
        while right < GUESSES and guess == ids[known + right]:
            right += 1
            guess = int(session.step(torch.tensor([guess])).argmax()) if right < GUESSES else -1
        in_a_row.append(right)
        confirmed, known = known, known + right + 1
    return first, in_a_row


def test_it_guesses_what_the_model_writes(draft, texts):
    first, in_a_row = [], []
    for ids, hidden in zip(*texts, strict=True):
        one, other = rounds(draft, ids.tolist(), hidden)
        first, in_a_row = first + one, in_a_row + other
    acceptance, mean = sum(first) / len(first), sum(in_a_row) / len(in_a_row)
    print(f"of {len(first)} rounds: first guess {acceptance:.3f}, in a row {mean:.3f}")
    assert acceptance >= LEAST_ACCEPTANCE and mean >= LEAST_IN_A_ROW


def test_it_is_small(draft):
    assert (PATH / "draft.safetensors").stat().st_size < 1e6


def test_one_for_another_model_is_left_alone_unless_it_is_asked_for(tmp_path):
    save_checkpoint("llama", tmp_path)
    model, checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path), ModelCheckpoint.open(tmp_path)
    assert isinstance(open_speculation("auto", model, checkpoint).draft, LookupDraft)  # there is none
    path = shutil.copy(PATH / "draft.safetensors", tmp_path)
    assert isinstance(open_speculation("auto", model, checkpoint).draft, LookupDraft)
    with pytest.raises(ValueError, match="is a draft for tiny-python-docs, not for"):
        open_speculation(path, model, checkpoint)


def test_a_classifier_has_none(tmp_path):
    save_checkpoint("llama", tmp_path, task="sequence-classification")
    path = shutil.copy(PATH / "draft.safetensors", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert own_draft(model) is None
    with pytest.raises(ValueError, match="has no head"):
        load_distilled(Path(path), model)


def test_a_model_with_other_tokens_or_none_at_all_is_no_draft(tmp_path):
    save_checkpoint("llama", tmp_path / "model")
    save_checkpoint("llama", tmp_path / "other", vocab_size=VOCAB + 8)
    checkpoint = ModelCheckpoint.open(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert open_speculation(str(tmp_path / "model"), model, checkpoint).draft
    with pytest.raises(ValueError, match=rf"has other tokens than model \({VOCAB + 8} against {VOCAB}\)"):
        open_speculation(str(tmp_path / "other"), model, checkpoint)
    with pytest.raises(CheckpointError, match="nobody/knows-this"):
        open_speculation("nobody/knows-this", model, checkpoint)
