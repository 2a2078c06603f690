"""The client's head in int8 against the head it replaces, tied to the embedding and untied, in every family."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.model.head import Int8Head, check_head_quant, final_norm, float_head, quantize_head_
from swarm_client.model.model import load_client
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.families import UNLIKE
from tests.marks import SLOW
from tests.zoo import HIDDEN, SUPPORTED, VOCAB, save_checkpoint

CPU = torch.device("cpu")
BOUND = 0.02  # relative error of logits
OFTEN = ("llama", "gpt2", "bloom", "gpt_oss")
TIES = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def load(directory: Path | str, auto_class=AutoModelForCausalLM, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    return load_client(ModelCheckpoint.open(directory), auto_class, dtype, CPU)


@pytest.fixture
def client(tmp_path, tied) -> PreTrainedModel:
    """A client's half of a llama, with its head in int8."""
    save_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    model = load(tmp_path)
    quantize_head_(model)
    return model


@pytest.fixture(scope="module")
def shipped() -> tuple[PreTrainedModel, torch.Tensor]:
    """The shipped model, and what its head is given for held-out text: [tokens, hidden_size]."""
    path = Path(locate(DEFAULT_MODEL))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(path)((path / "heldout.txt").read_text()[:2000], return_tensors="pt").input_ids
    with torch.inference_mode():
        return model, model.model(ids).last_hidden_state[0]


@TIES
def test_logits_of_the_shipped_model(shipped, tied):
    model, hidden = shipped
    client = load(locate(DEFAULT_MODEL))
    if not tied:
        client.lm_head.weight = nn.Parameter(client.lm_head.weight.detach().clone())
    quantize_head_(client)
    with torch.inference_mode():
        logits, exact = client.lm_head(hidden), model.lm_head(hidden)
    assert 0 < error(logits, exact) <= BOUND
    assert (logits.argmax(-1) == exact.argmax(-1)).float().mean() > 0.98
    assert torch.equal(client.get_input_embeddings().weight, model.get_input_embeddings().weight)
    alone = torch.cat([client.lm_head(row) for row in hidden[:20].split(1)])
    assert torch.equal(alone, logits[:20])


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *(pytest.param(name, False, id=f"untied-{name}", marks=() if name in OFTEN else SLOW) for name in UNLIKE),
        *(pytest.param(name, True, id=f"tied-{name}", marks=SLOW) for name in SUPPORTED),
    ],
)
def test_head_of_every_family(tmp_path, name, tied):
    save_checkpoint(name, tmp_path, tie_word_embeddings=tied)
    stock, model = AutoModelForCausalLM.from_pretrained(tmp_path), load(tmp_path)
    tied = stock.get_output_embeddings().weight is stock.get_input_embeddings().weight  # some families never tie
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    assert (head.weight is embedding) == tied
    hidden, before = torch.randn(3, 5, head.in_features), embedding.detach().clone()
    with torch.inference_mode():
        expected = head(hidden)
        quantize_head_(model)
        quantised = model.get_output_embeddings()
        assert isinstance(quantised, Int8Head) and quantised.tied == tied and not quantised.training
        assert error(quantised(hidden), expected) <= BOUND
    assert model.get_input_embeddings().weight is embedding and torch.equal(embedding, before)


@TIES
def test_no_float_copy_stays(tmp_path, tied):
    save_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    model = load(tmp_path)
    shape = (VOCAB, HIDDEN)

    def num_copies() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
        return sum(tensor.shape == shape and tensor.is_floating_point() for tensor in tensors)

    original, before = weakref.ref(model.lm_head.weight), num_copies()
    quantize_head_(model)
    assert num_copies() == (before if tied else before - 1)
    assert [name for name, param in model.named_parameters() if param.shape == shape] == ["model.embed_tokens.weight"]
    assert (original() is None) != tied


def test_bias_and_dtype_stay(tmp_path):
    save_checkpoint("phi", tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    model.lm_head.bias.data.normal_()
    hidden = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
    expected = model.lm_head(hidden)
    quantize_head_(model)
    result = model.lm_head(hidden)
    assert result.dtype == torch.bfloat16 and error(result.float(), expected.float()) <= BOUND
    with float_head(model):
        assert model.lm_head.weight.dtype == model.lm_head.bias.dtype == torch.bfloat16
        assert error(model.lm_head(hidden).float(), expected.float()) <= BOUND


@pytest.mark.parametrize("tied", [True])
def test_gradients_reach_the_hidden_states(client):
    hidden = torch.randn(4, HIDDEN, requires_grad=True)
    client.lm_head(hidden).sum().backward()
    expected = client.get_input_embeddings().weight.detach().sum(0)
    assert all(error(row, expected) < BOUND for row in hidden.grad)


def test_classifier_keeps_its_head(tmp_path):
    save_checkpoint("llama", tmp_path, task="sequence-classification", num_labels=3)
    model = load(tmp_path, AutoModelForSequenceClassification)
    score = model.score
    quantize_head_(model)
    assert model.score is score


# ------------------------------------------------------------ what else the stock class does with a head


@TIES
@pytest.mark.parametrize("size", [VOCAB + 7, VOCAB - 5])
def test_vocabulary_can_be_resized(client, tied, size):
    client.resize_token_embeddings(size)
    head, embedding = client.lm_head, client.get_input_embeddings().weight
    assert isinstance(head, Int8Head) and head.tied == tied
    assert head(torch.randn(1, HIDDEN)).shape == (1, size) and embedding.shape == (size, HIDDEN)
    if tied:
        assert error(head.weight, embedding) < BOUND


@TIES
def test_tying_again_rounds_the_embedding_of_now(client, tied):
    embedding, before = client.get_input_embeddings().weight, client.lm_head.weight
    embedding.data.mul_(2)
    client.tie_weights()
    assert client.lm_head.tied == tied
    torch.testing.assert_close(client.lm_head.weight, before * (2 if tied else 1), rtol=1e-3, atol=1e-3)
    assert client.get_input_embeddings().weight is embedding


@TIES
def test_shown_weights_are_those_of_a_float_head(client, tied):
    rounded, embedding = client.lm_head.weight, client.get_input_embeddings().weight
    with float_head(client):
        shown = client.state_dict()["lm_head.weight"]
        assert torch.equal(shown, embedding if tied else rounded)
    assert isinstance(client.lm_head, Int8Head)


# ------------------------------------------------------------ asking for it


def test_wrong_wish_is_explained():
    with pytest.raises(ValueError, match="head_quant 'int4' is unknown: expected none or int8"):
        DistributedModel.from_pretrained(head_quant="int4")
    with pytest.raises(ValueError, match="head_quant 'int8' runs on cpu, not on cuda: choose 'none'"):
        check_head_quant("int8", torch.device("cuda"))
    with pytest.raises(ValueError, match="device 'abacus' is unknown: expected cpu, cuda"):
        DistributedModel.from_pretrained(device="abacus")


def test_head_that_is_not_linear_is_refused(tmp_path):
    save_checkpoint("llama", tmp_path)
    model = load(tmp_path)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="is a Sequential, expected a Linear"):
        quantize_head_(model)


@pytest.mark.parametrize("tied", [True])
def test_the_norm_behind_the_blocks(client, tied):
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(final_norm(client.model)(hidden), client.model.norm(hidden))
    client.model.norm = None  # some models end with their last block
    assert torch.equal(final_norm(client.model)(hidden), hidden)
