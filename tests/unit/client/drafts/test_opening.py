"""Which drafts a model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from swarm_client.drafts.opening import open_speculation
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from tests.zoo import VOCAB, save_checkpoint


def test_a_draft_of_other_vocabulary_or_name_is_refused(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    save_checkpoint("llama", model)
    save_checkpoint("llama", other, vocab_size=VOCAB + 8)
    checkpoint = ModelCheckpoint.open(model)
    client = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ValueError, match=rf"has other tokens than .*\({VOCAB + 8} against {VOCAB}\)"):
        open_speculation(str(other), client, checkpoint)
    with pytest.raises((ValueError, CheckpointError), match="nobody/knows-this"):
        open_speculation("nobody/knows-this", client, checkpoint)
