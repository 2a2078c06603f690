"""Hugging Face's Trainer goes on from its checkpoints, also with a model in a wrapper of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

from tests.marks import always
from tests.swarm.pair import connected, random_ids
from tests.swarm.tuning import lora, trained

SPANS = ("0:2", "2:6")


def options(directory: Path, **others: Any) -> TrainingArguments:
    return TrainingArguments(
        str(directory),
        **{
            "max_steps": 6,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "learning_rate": 0.02,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "seed": 3,
            "disable_tqdm": True,
            **others,
        },
    )


def trainer_of(model: Any, directory: Path, kind: type[Trainer] = Trainer, **others: Any) -> Trainer:
    data = [{"input_ids": row, "labels": row} for row in random_ids(10, 8, seed=6)]
    return kind(model, options(directory, **others), train_dataset=data[:8], eval_dataset=data[8:])


def adapted(remote: Any, kind: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    if kind == "prompts":
        remote.add_prompts("deep_prompt", 3)
    elif kind == "peft":
        return get_peft_model(remote, lora(lora_dropout=0.1))
    else:
        remote.add_adapter(lora(lora_dropout=0.1))
    return remote


KINDS = ("adapter", "peft", "prompts")


@pytest.mark.promise("Hugging Face's Trainer trains, and resumes")
@pytest.mark.parametrize("kind", always("peft", among=KINDS))
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(servers, tmp_path, kind):
    with connected(servers) as remote:
        model = adapted(remote, kind)
        trainer_of(model, tmp_path).train()
        expected = [parameter.detach().clone() for parameter in trained(model)]
    with connected(servers) as remote:
        model = adapted(remote, kind, seed=2)
        trainer_of(model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        for resumed, uninterrupted in zip(trained(model), expected, strict=True):
            torch.testing.assert_close(resumed.detach(), uninterrupted, rtol=0, atol=1e-6)


class FirstIsBest(Trainer):
    """By its measure, the best weights are the first that are saved."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {**super().evaluate(*args, **kwargs), "eval_step": self.state.global_step}


@pytest.mark.parametrize("kind", always("adapter", among=KINDS))
def test_the_best_weights_are_loaded_at_the_end(servers, tmp_path, kind):
    with connected(servers) as remote:
        model = adapted(remote, kind)
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_step", "greater_is_better": False}
        trainer = trainer_of(model, tmp_path, FirstIsBest, **best)
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
        assert all(abs(later - losses[0]) > 1e-3 for later in losses[1:])
