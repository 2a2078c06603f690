"""The model that ships with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks

PATH = Path(locate(DEFAULT_MODEL))
WINDOW = 256  # tokens that are predicted from one another
NUM_WINDOWS = 12


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """[NUM_WINDOWS, WINDOW] tokens of text that the model was not trained on."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    ids = tokenizer((PATH / "heldout.txt").read_text(), return_tensors="pt", verbose=False).input_ids[0]
    starts = torch.linspace(0, len(ids) - WINDOW, NUM_WINDOWS).long()
    return torch.stack([ids[start : start + WINDOW] for start in starts])


def loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Nats per token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def test_is_a_small_llama_of_twenty_blocks(model):
    assert type(model) is LlamaForCausalLM
    assert model.config.num_hidden_layers == 20
    assert 3e6 <= model.num_parameters() <= 6e6
    assert sum(file.stat().st_size for file in PATH.glob("*.safetensors")) <= 12e6


def test_predicts_python_documentation_far_better_than_chance(model, windows):
    text_bytes = len("".join(AutoTokenizer.from_pretrained(PATH).batch_decode(windows)).encode())
    with torch.inference_mode():
        nats = loss(model(windows).logits, windows) * windows.numel()
    bits_per_byte = nats / torch.log(torch.tensor(2.0)) / text_bytes
    assert bits_per_byte < 2.0  # bytes drawn by their frequency in English text: about 4.5


def test_int8_costs_at_most_half_a_percent_of_held_out_loss(model, windows):
    stack = load_blocks(
        ModelCheckpoint.open(PATH),
        Span(0, 20),
        transform=lambda block, _index: quantize_(block, "int8", torch.device("cpu"), torch.float32),
    )
    with torch.inference_mode():
        exact = loss(model(windows).logits, windows)
        hidden = stack(model.model.embed_tokens(windows), None, torch.arange(WINDOW)[None])
        quantised = loss(model.lm_head(model.model.norm(hidden)), windows)
    assert quantised != exact  # int8 did take part
    assert quantised <= exact * 1.005
