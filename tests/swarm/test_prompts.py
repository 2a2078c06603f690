"""Prompts, shallow and deep, train and generate as they do on the whole model with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel

from swarm_client import DistributedModelForSequenceClassification, RequestRejected
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from tests.marks import always
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, hosted, random_ids
from tests.swarm.tuning import assert_close, lora, padded_batch, trained, whole_model
from tests.zoo import POSITIONS

NUM = 5
SPANS = ("0:2", "2:6")
MODES = ("prompt", "deep_prompt")
NEW = 8


@dataclass
class Prompted:
    """The whole model with prompts put in by hand: embeddings before, and sums in hooks of its blocks."""

    whole: PreTrainedModel
    embedding: torch.Tensor
    deep: torch.Tensor | None

    @classmethod
    def like(cls, remote: PreTrainedModel, servers: InProcessServers) -> Prompted:
        prompts, whole = remote.prompts, whole_model(servers.model)
        deep = None if prompts.deep is None else prompts.deep.detach().clone().requires_grad_(True)
        prompted = cls(whole, prompts.embedding.detach().clone().requires_grad_(True), deep)
        family = ModelCheckpoint.open(servers.model).family
        base = next(module for module in whole.modules() if isinstance(module, family.base_class))
        for index, block in enumerate(getattr(family.owner_of(base), family.blocks)):
            block.register_forward_pre_hook(prompted._adding(index))
        return prompted

    def _adding(self, index: int) -> Callable:
        def hook(_block, inputs):
            hidden, *others = inputs
            if self.deep is None or hidden.shape[1] <= NUM:
                return None
            hidden = torch.cat([hidden[:, :NUM] + self.deep[index], hidden[:, NUM:]], 1)
            return (hidden, *others)

        return hook

    def __call__(self, input_ids, attention_mask, labels=None) -> Any:
        """Logits, and loss, of the tokens that are given."""
        embeddings = self.whole.get_input_embeddings()(input_ids)
        embeddings = torch.cat([self.embedding.expand(len(input_ids), -1, -1), embeddings], 1)
        mask = torch.cat([attention_mask.new_ones(len(input_ids), NUM), attention_mask], 1)
        output = self.whole(inputs_embeds=embeddings, attention_mask=mask, use_cache=False)
        output.logits = output.logits[:, NUM:]
        if labels is not None:
            output.loss = torch.nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return output

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Greedy, of rows without padding."""
        tokens = input_ids
        for _ in range(NEW):
            with torch.no_grad():
                logits = self(tokens, torch.ones_like(tokens)).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.embedding] if self.deep is None else [self.embedding, self.deep]


@pytest.fixture(scope="module", params=always("llama", among=("llama", "gpt2", "bloom")))
def servers(request, tmp_path_factory) -> Iterator[InProcessServers]:
    with hosted(tmp_path_factory.mktemp(request.param), *SPANS, name=request.param) as servers:
        yield servers


@pytest.fixture(params=MODES)
def remote(request, servers) -> Iterator[PreTrainedModel]:
    with connected(servers, tuning_mode=request.param, num_prompt_tokens=NUM) as remote:
        for parameter in trained(remote):
            torch.nn.init.normal_(parameter, std=0.3)
        yield remote


@pytest.mark.promise("virtual tokens train as on the local model")
def test_steps(remote, servers):
    local, batch = Prompted.like(remote, servers), padded_batch()
    for model, parameters in ((local, local.parameters), (remote, trained(remote))):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    for found, expected in zip(trained(remote), local.parameters, strict=True):
        assert expected.grad.abs().max() > 0
        assert_close(found.grad, expected.grad)
        assert_close(found, expected)


def test_logits_are_those_of_real_tokens(remote, servers):
    local, batch = Prompted.like(remote, servers), padded_batch()
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = local(**batch).logits[mask]
        output = remote(**batch, output_hidden_states=True)
        assert output.logits.shape[:2] == batch["input_ids"].shape
        assert all(hidden.shape[:2] == mask.shape for hidden in output.hidden_states)
        for options in ({}, {"use_cache": False}):
            assert_close(remote(**batch, **options).logits[mask], expected)


def test_tokens(remote, servers):
    ids = random_ids(2, 9, seed=1)
    expected = Prompted.like(remote, servers).generate(ids)
    known = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(remote.generate(ids, attention_mask=torch.ones_like(ids), **known), expected)
    cache = remote.new_cache()
    first = remote.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **{**known, "max_new_tokens": 3}
    )
    again = remote.generate(
        first, attention_mask=torch.ones_like(first), past_key_values=cache, **{**known, "max_new_tokens": NEW - 3}
    )
    assert torch.equal(again, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    assert torch.equal(remote.generate(padded, attention_mask=mask, **known)[:, 3:], expected)


@pytest.mark.parametrize("options", [{"num_return_sequences": 2, "num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_other_ways_to_generate(remote, options):
    ids = random_ids(1, 6, seed=2).repeat(1, 2)
    known = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    expected = remote.generate(ids, use_cache=False, **known, **{**options, "prompt_lookup_num_tokens": None})
    assert torch.equal(remote.generate(ids, **known, **options), expected)


def test_saved_and_loaded(remote, servers, tmp_path):
    batch = padded_batch()
    remote.save_pretrained(tmp_path)
    mode = "prompt" if remote.prompts.deep is None else "deep_prompt"
    with connected(servers, tuning_mode=mode, num_prompt_tokens=NUM) as other, torch.no_grad():
        assert not torch.equal(other(**batch).logits, remote(**batch).logits)
        other.load_prompts(tmp_path)
        assert torch.equal(other(**batch).logits, remote(**batch).logits)
    with connected(servers, tuning_mode=mode, num_prompt_tokens=NUM + 1) as other:
        shapes = [list(parameter.shape) for parameter in trained(other)]
        with pytest.raises(ValueError, match="has prompts of shapes"):
            other.load_prompts(tmp_path)
        assert [list(parameter.shape) for parameter in trained(other)] == shapes


def test_shallow_prompts_are_those_of_peft(servers, tmp_path):
    ids = random_ids(2, 9, seed=3)
    with connected(servers, tuning_mode="prompt", num_prompt_tokens=NUM) as remote, torch.no_grad():
        remote.save_pretrained(tmp_path)
        local = PeftModel.from_pretrained(whole_model(servers.model), tmp_path).eval()
        assert_close(remote(ids).logits, local(ids).logits[:, NUM:])
        known = {"max_new_tokens": NEW, "do_sample": False}
        expected = local.generate(input_ids=ids, **known)
        assert torch.equal(remote.generate(ids, **known)[:, 9:], expected[:, -NEW:])
        local.prompt_encoder["default"].embedding.weight.normal_(std=0.2)
        local.save_pretrained(tmp_path / "theirs")
        remote.load_prompts(tmp_path / "theirs")
        assert_close(remote(ids).logits, local(ids).logits[:, NUM:])


def test_prompt_tuning_of_peft_itself(servers):
    """``get_peft_model`` on a distributed model."""
    batch, models = padded_batch(), []
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM)
    with connected(servers) as remote:
        for model in (whole_model(servers.model), remote):
            torch.manual_seed(1)
            models.append(get_peft_model(model, config).eval())
        grads = []
        for model in models:
            model(**batch).loss.backward()
            grads.append(trained(model)[0].grad)
        assert_close(grads[1], grads[0])
        tokens = [
            m.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=NEW,
                do_sample=False,
            )
            for m in models
        ]
        assert torch.equal(*tokens)


# ------------------------------------------------------------ for one family


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Iterator[InProcessServers]:
    classifier = {"task": "sequence-classification", "num_labels": 3}
    with hosted(tmp_path_factory.mktemp("llama"), *SPANS, config=classifier) as servers:
        yield servers


def test_a_classifier_with_prompts(llama, tmp_path):
    """Its new head is trained too, and the last token of each row is found behind the virtual ones."""
    ids = random_ids(4, 9, seed=4)
    ids[1, 7:] = 0
    labels = torch.tensor([0, 1, 2, 1])
    options = {"tuning_mode": "deep_prompt", "num_prompt_tokens": NUM}
    with connected(llama, DistributedModelForSequenceClassification, **options) as remote:
        names = [name for name, parameter in remote.named_parameters() if parameter.requires_grad]
        assert [name.rpartition(".")[2] for name in names] == [
            "embedding",
            "deep",
            "weight",
        ] and "score.weight" in names
        optimizer = torch.optim.Adam(trained(remote), lr=0.05)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = remote(ids, attention_mask=(ids != 0).long(), labels=labels).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 2
        remote.save_pretrained(tmp_path)
        with connected(llama, DistributedModelForSequenceClassification, **options) as other:
            other.load_prompts(tmp_path)
            with torch.no_grad():
                assert torch.equal(other(ids).logits, remote(ids).logits)


def test_lora_and_deep_prompts_together(servers):
    if servers.model.name[:5] != "llama":
        pytest.skip("once is enough")
    batch = padded_batch()
    with connected(servers, tuning_mode="deep_prompt", num_prompt_tokens=NUM) as remote:
        remote.add_adapter(lora(init_lora_weights="orthogonal"))
        assert len(trained(remote)) == 26
        remote(**batch).loss.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in trained(remote))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning_mode": "ptune"}, "tuning_mode 'ptune' is unknown: expected one of prompt, deep_prompt"),
        ({"tuning_mode": "prompt", "num_prompt_tokens": 0}, "num_prompt_tokens is 0: expected a number of at least 1"),
    ],
)
def test_refused_options(llama, options, message):
    known = {"initial_peers": llama.initial_peers, "swarm": llama.swarm}
    with pytest.raises(ValueError, match=message):
        DistributedModelForSequenceClassification.from_pretrained(str(llama.model), **known, **options)


def test_virtual_tokens_count_as_positions(servers):
    if not hasattr(ModelCheckpoint.open(servers.model).config, "max_position_embeddings"):
        pytest.skip("a model without a limit")
    ids = random_ids(1, POSITIONS - 5, seed=5)
    with connected(servers, tuning_mode="prompt", num_prompt_tokens=NUM) as remote:
        with pytest.raises(RequestRejected, match=f"need {POSITIONS + 1} positions, but the model has {POSITIONS}"):
            remote.generate(ids, max_new_tokens=2)
        remote.generate(ids, max_new_tokens=1)
