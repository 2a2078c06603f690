"""Reinforcement with TRL through servers: the same completions, losses and adapters as TRL with the whole model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm_client import LabelledPositions
from swarm_client.adapters.snapshots import AdapterUploader
from tests.small_chat_model import NEEDS_IT
from tests.swarm.test_benchmarks import run_quick
from tests.swarm.test_examples import run
from tests.swarm.tuning import Tuned, assert_close, lora, tuned
from tests.zoo import COMMON, EOS, PAD, VOCAB

SPANS = ("0:3", "3:6")

datasets = pytest.importorskip("datasets", reason="datasets is not installed: make test-trl")
trl = pytest.importorskip("trl", reason="trl is not installed: make test-trl")
trainer_utils = pytest.importorskip("trl.trainer.utils")
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, COMPLETIONS, NEW = 3, 4, 10
WORDS = [f"w{number}" for number in range(VOCAB)]
PROMPTS = ["w11 w12 w13 w14 w15", "w21 w22 w23", "w31 w32 w33 w34", "w41 w42 w43"]


@dataclass
class Trained:
    """What one trainer has done."""

    losses: list[float]
    completions: list[str] = field(default_factory=list)


@pytest.fixture
def pair(servers, skip_padding) -> Iterator[Tuned]:
    with tuned(servers, lora(), wraps=True, skip_padding=skip_padding) as pair:
        yield pair


@pytest.fixture
def uploads(monkeypatch) -> Counter[str]:
    """How many adapters each connection to a server has uploaded, by the span of blocks."""
    counts: Counter[str] = Counter()
    init = AdapterUploader.__init__

    def counted(uploader: AdapterUploader, put: Any) -> None:
        async def count(data: bytes, span: Any) -> None:
            counts[str(span)] += 1
            await put(data, span)

        init(uploader, count)

    monkeypatch.setattr(AdapterUploader, "__init__", counted)
    return counts


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[3]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=WORDS[PAD], eos_token=WORDS[EOS])


def arguments(directory: Path) -> dict[str, Any]:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    steps = {"max_steps": STEPS, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant"}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return {"output_dir": str(directory), **plain, **quiet, **steps}


def grpo(model: Any, directory: Path, callbacks: list[Any], **options: Any) -> Trained:
    """Reward the words of even numbers."""
    trained = Trained([])

    def reward(completions: list[str], **_: Any) -> list[float]:
        trained.completions += completions
        return [float(sum(int(word[1:]) % 2 == 0 for word in text.split())) for text in completions]

    shape = {"num_generations": COMPLETIONS, "per_device_train_batch_size": 2 * COMPLETIONS}
    config = trl.GRPOConfig(**arguments(directory), **shape, max_completion_length=NEW, **options)
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = trl.GRPOTrainer(
        model, reward, config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )
    trainer.train()
    trained.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trained


def dpo(model: Any, directory: Path) -> Trained:
    config = trl.DPOConfig(**arguments(directory), per_device_train_batch_size=2)
    rows = [{"prompt": prompt, "chosen": " w50 w52 w54", "rejected": " w51 w53"} for prompt in PROMPTS]
    trainer = trl.DPOTrainer(
        model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    return Trained([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize(("beta", "skip_padding"), [(0.0, True), (0.1, False)])
def test_grpo(pair, tmp_path, uploads, beta, skip_padding):
    callbacks = ([], [LabelledPositions()] if skip_padding else [])
    local, remote = (grpo(model, tmp_path, each, beta=beta) for model, each in zip(pair.models, callbacks, strict=True))
    assert remote.completions == local.completions
    assert any(len(text.split()) < NEW for text in local.completions)  # some ended before others
    assert any(remote.losses)
    assert remote.losses == pytest.approx(local.losses, abs=1e-4)
    for trained_here, expected in zip(*pair.parameters, strict=True):
        assert_close(expected, trained_here, relative=1e-3)
    # The adapter travels once per step to each server: its completions and its gradients use the same upload.
    assert uploads == {"0:3": STEPS, "3:6": STEPS}


@pytest.mark.parametrize("skip_padding", [True])
def test_dpo(pair, tmp_path):
    local, remote = (dpo(model, tmp_path) for model in pair.models)
    assert remote.losses[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model without the adapter
    assert remote.losses[-1] != pytest.approx(remote.losses[0], abs=1e-4)
    assert remote.losses == pytest.approx(local.losses, abs=1e-4)


def scored(model: LlamaForCausalLM, labels: torch.Tensor) -> tuple[Any, torch.Tensor, int]:
    """Return what TRL's forward pass returns, the gradient of the embedding, and the operations of both passes."""
    model.zero_grad()
    tokens = torch.arange(labels.numel()).view(labels.shape) % VOCAB
    with FlopCounterMode(display=False) as counter:
        output = model(tokens, labels=labels, fused_lm_head=True)
        (output.loss + output.log_probs.square().sum() + output.entropy.sum()).backward()
    return output, model.model.embed_tokens.weight.grad.clone(), counter.get_total_flops()


@pytest.mark.parametrize("num_labels", [0, 3])
def test_labelled_positions_alone_are_scored(num_labels):
    model = LlamaForCausalLM(LlamaConfig(**COMMON)).eval()
    trainer_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    labels = torch.full((2, 16), -100)
    labels[0, 8 : 8 + num_labels] = torch.arange(num_labels) + 11
    labels[1, 12 : 12 + num_labels] = torch.arange(num_labels) + 21
    whole, whole_gradient, whole_flops = scored(model, labels)
    LabelledPositions().on_train_begin(None, None, None, model=model)
    output, gradient, flops = scored(model, labels)
    for name, expected in whole.items():
        assert_close(output[name].float(), expected.float())
    assert_close(gradient, whole_gradient)
    head_flops = (
        2 * model.config.hidden_size * VOCAB * 2
    )  # of a position: forward, and once more backward; others are in place, not counted
    assert whole_flops - flops == pytest.approx(head_flops * (30 - 2 * num_labels))


@NEEDS_IT
def test_the_example_takes_a_step_and_saves_its_adapter(tmp_path):
    printed = run("grpo.py", "--steps", "1", "--output", str(tmp_path / "adapter"), cache=tmp_path)
    assert re.search(r"\d+ were right before, \d+ are right after", printed)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_the_benchmark_measures_both(tmp_path):
    rows = run_quick("reinforcement.py", tmp_path)["rows"]
    assert rows.keys() == {"local", "local, labelled positions", "swarm"}
    assert all(row["measured"] > 0 for row in rows.values())
