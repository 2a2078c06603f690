"""LoRA in remote blocks trains, saves, loads and generates as plain PEFT does on the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.marks import always
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, hosted, random_ids
from tests.swarm.tuning import assert_close, lora, loss_of, padded_batch, trained, tuned, whole_model

SPANS = ("0:2", "2:6")
BATCH = padded_batch()
FAMILIES = {
    "llama": ("q_proj", "v_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "falcon-7b": ("query_key_value", "dense"),
    "gpt_oss": r".*\.(q_proj|o_proj)",
    "qwen3": "all-linear",
}


@pytest.fixture(scope="module", params=always("llama", among=FAMILIES))
def family(request, tmp_path_factory) -> Iterator[tuple[InProcessServers, LoraConfig]]:
    with hosted(tmp_path_factory.mktemp(request.param), *SPANS, name=request.param) as servers:
        yield servers, lora(FAMILIES[request.param])


# ------------------------------------------------------------ training


@pytest.mark.promise("LoRA trains as plain PEFT does on the local model")
def test_gradients_and_steps(family):
    with tuned(*family) as pair:
        pair.train(1, loss_of(**BATCH))
        for model in pair.models:
            model.zero_grad()
            loss_of(**BATCH)(model).backward()
        for local, remote in zip(*pair.parameters, strict=True):
            assert local.grad.abs().max() > 0
            assert_close(remote.grad, local.grad)
        pair.train(3, loss_of(**BATCH))
        pair.assert_same_weights()
        pair.assert_same_logits(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"])


def test_bfloat16_autocast(servers):
    """What the client computes is rounded, its head above all; servers compute as they do."""
    with tuned(servers, lora()) as pair:
        pair.train(1, loss_of(**BATCH))
        for model, enabled in zip(pair.models, (False, True), strict=True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = model(**BATCH).loss
            loss.backward()
        for local, remote in zip(*pair.parameters, strict=True):
            assert remote.grad.dtype == torch.float32
            assert not torch.equal(remote.grad, local.grad)
            assert_close(remote.grad, local.grad, relative=0.05)


# ------------------------------------------------------------ dropout


@pytest.mark.promise("a backward pass drops the elements that its forward pass dropped")
def test_dropout_of_backward_is_that_of_forward(servers):
    """The loss is linear in B at its zeros: its gradient times a small step is what the loss changes by."""
    with tuned(servers, lora(lora_dropout=0.5)) as pair:
        remote = pair.remote.train()

        def loss() -> torch.Tensor:
            torch.manual_seed(7)
            return remote(**BATCH).loss

        loss().backward()
        step = 1e-3
        parameters = trained(remote)
        squares = sum(parameter.grad.square().sum() for parameter in parameters)
        with torch.no_grad():
            lengths = []
            for sign in (1, -2):
                for parameter in parameters:
                    parameter += sign * step * parameter.grad
                lengths.append(loss())
        assert abs((lengths[0] - lengths[1]) / (2 * step) / squares - 1) < 0.02


# ------------------------------------------------------------ files


@pytest.mark.promise("an adapter is saved in PEFT's own format")
def test_saved_here_loads_in_peft(family, tmp_path):
    servers, _ = family
    with tuned(*family) as pair:
        pair.train(2, loss_of(**BATCH))
        pair.remote.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            servers.model
        )
        base = AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32)
        again = PeftModel.from_pretrained(base, tmp_path)
        ids = BATCH["input_ids"]
        with torch.no_grad():
            assert_close(pair.remote.eval()(ids).logits, again(ids).logits)


def test_saved_by_peft_loads_here_and_trains_on(family, tmp_path):
    servers, _ = family
    with tuned(*family) as pair:
        pair.train(2, loss_of(**BATCH))
        pair.local.save_pretrained(tmp_path)
        with connected(servers) as remote:
            remote.load_adapter(tmp_path)
            assert trained(remote) == []
            ids = BATCH["input_ids"]
            with torch.no_grad():
                assert_close(remote(ids).logits, pair.local.eval()(ids).logits)
        with connected(servers) as remote:
            remote.load_adapter(tmp_path, trainable=True)
            on = type(pair)(pair.local, remote)
            on.train(2, loss_of(**BATCH))
            on.assert_same_weights()


def test_several_adapters_by_name(servers, tmp_path):
    ids = BATCH["input_ids"]
    with tuned(servers, lora()) as pair:
        remote = pair.remote
        pair.train(1, loss_of(**BATCH))
        with torch.no_grad():
            plain, first = whole_model(servers.model)(ids).logits, remote(ids).logits
            remote.add_adapter(lora(["o_proj"], init_lora_weights="orthogonal"), "other")
            assert remote.active_adapters() == ["other"]
            second = remote(ids).logits
            remote.disable_adapters()
            assert torch.equal(remote(ids).logits, plain)
            remote.enable_adapters()
            remote.set_adapter("default")
            assert torch.equal(remote(ids).logits, first) and not torch.equal(first, second)
            remote.delete_adapter("other")
            remote.delete_adapter("default")
            assert torch.equal(remote(ids).logits, plain)
        remote.add_adapter(lora())


# ------------------------------------------------------------ generation


@pytest.mark.promise("generations with different adapters share servers")
def test_two_clients_with_different_adapters_at_once(servers):
    ids = random_ids(1, 9, seed=3)
    with (
        tuned(servers, lora()) as one,
        tuned(servers, lora(["o_proj", "down_proj"])) as two,
        connected(servers) as bare,
    ):
        for seed, pair in enumerate((one, two)):
            pair.train(2 + seed, loss_of(**padded_batch(seed=seed)))
        remotes, locals_ = [one.remote, two.remote, bare], [one.local, two.local, whole_model(servers.model)]
        caches = [model.eval().new_cache() for model in remotes]
        tokens = [ids] * 3
        for _ in range(8):
            for number, (model, cache) in enumerate(zip(remotes, caches, strict=True)):
                with torch.no_grad():
                    new = tokens[number] if not cache.get_seq_length() else tokens[number][:, -1:]
                    logits = model(new, past_key_values=cache).logits
                tokens[number] = torch.cat([tokens[number], logits[:, -1:].argmax(-1)], 1)
        for model, found in zip(locals_, tokens, strict=True):
            assert torch.equal(found, model.eval().generate(input_ids=ids, max_new_tokens=8, do_sample=False))


# ------------------------------------------------------------ beside the blocks
