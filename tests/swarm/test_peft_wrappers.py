"""PEFT's own wrappers work on a distributed model as on the whole one."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from swarm_client import RequestRejected
from tests.marks import always
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected
from tests.swarm.tuning import Tuned, assert_close, lora, loss_of, padded_batch, trained, tuned, whole_model

SPANS = ("0:2", "2:6")

BATCH = padded_batch()
IDS = BATCH["input_ids"]


def in_peft(servers: InProcessServers, config: LoraConfig) -> AbstractContextManager[Tuned]:
    return tuned(servers, config, wraps=True)


def assert_same_logits(pair: Tuned) -> None:
    pair.assert_same_logits(input_ids=IDS, attention_mask=BATCH["attention_mask"])


CONFIGS = {
    "attention": lora(task_type="CAUSAL_LM"),
    "all-linear": lora("all-linear"),
    "some-blocks": lora(layers_to_transform=[1, 4], use_rslora=True, rank_pattern={"v_proj": 2}),
    "with-the-head": lora(("q_proj", "lm_head", "embed_tokens")),
    "with-a-head-of-its-own": lora(modules_to_save=["lm_head"]),
    "the-head-alone": lora(["lm_head"]),
}


@pytest.mark.promise("peft.get_peft_model does the same as on the local model")
@pytest.mark.parametrize("name", always("attention", among=CONFIGS))
def test_get_peft_model(servers, name, tmp_path):
    """Names, gradients, weights, tokens and files are those of PEFT on the whole model."""
    with in_peft(servers, CONFIGS[name]) as pair:
        names = [[name for name, p in model.named_parameters() if p.requires_grad] for model in pair.models]
        assert names[1] == names[0]
        pair.train(1, loss_of(**BATCH))  # B leaves its zeros
        for model in pair.models:
            model.zero_grad()
            loss_of(**BATCH)(model).backward()
        for local, remote in zip(*pair.parameters, strict=True):
            assert_close(remote.grad, local.grad)
        pair.train(2, loss_of(**BATCH))
        pair.assert_same_weights()
        assert_same_logits(pair)
        tokens = [model.generate(input_ids=IDS[1:], max_new_tokens=6, do_sample=False) for model in pair.models]
        assert torch.equal(*tokens)
        with pair.local.disable_adapter(), pair.remote.disable_adapter():
            assert_same_logits(pair)
        for model, directory in zip(pair.models, ("local", "remote"), strict=True):
            model.save_pretrained(tmp_path / directory)
        files = [{path.name for path in (tmp_path / directory).iterdir()} for directory in ("local", "remote")]
        assert files[1] == files[0]
        configs, tensors = zip(*(saved(tmp_path / directory) for directory in ("local", "remote")), strict=True)
        assert configs[1] == configs[0] and list(tensors[1]) == list(tensors[0])
        again = PeftModel.from_pretrained(whole_model(servers.model), tmp_path / "remote")
        assert_same_logits(Tuned(again, pair.remote))


def saved(directory: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])  # a set
    return config, load_file(directory / "adapter_model.safetensors")


def test_peft_model_from_pretrained(servers, tmp_path):
    with in_peft(servers, lora(init_lora_weights=False)) as pair:
        pair.local.save_pretrained(tmp_path)
    with connected(servers) as remote, torch.no_grad():
        plain = remote(IDS).logits
        loaded = PeftModel.from_pretrained(remote, tmp_path)
        assert_same_logits(Tuned(pair.local, loaded))
        loaded.load_adapter(tmp_path, "another")
        loaded.set_adapter("another")
        assert_same_logits(Tuned(pair.local, loaded))
        loaded.delete_adapter("default")
        assert_same_logits(Tuned(pair.local, loaded))
        base = loaded.unload()
        assert base is remote and torch.equal(base(IDS).logits, plain)
        base.add_adapter(lora(init_lora_weights=False))
        assert not torch.allclose(base(IDS).logits, plain, atol=1e-3)
    with connected(servers) as remote:
        loaded = PeftModel.from_pretrained(remote, tmp_path, is_trainable=True, low_cpu_mem_usage=True)
        on = Tuned(pair.local, loaded.eval())
        on.train(2, loss_of(**BATCH))
        on.assert_same_weights()


def test_two_adapters_that_are_trained_in_turn(servers):
    with in_peft(servers, lora()) as pair:
        for model in pair.models:
            torch.manual_seed(8)
            model.add_adapter("other", lora(["o_proj", "v_proj"]))
        for name in ("other", "default", "other"):
            for model in pair.models:
                model.set_adapter(name)
            pair.train(2, loss_of(**BATCH))
            pair.assert_same_weights()
            assert_same_logits(pair)
        for model in pair.models:
            model.base_model.set_adapter(["default", "other"])
        with pytest.raises(RequestRejected, match="cannot all be active: choose one"):
            pair.remote(IDS)


def test_a_model_without_its_head(servers):
    whole = whole_model(servers.model)
    with connected(servers) as remote:
        states = []
        for model in (whole.model, remote.model):
            torch.manual_seed(3)
            model = get_peft_model(model, lora(init_lora_weights=False)).eval()
            hidden = model(**{name: BATCH[name] for name in ("input_ids", "attention_mask")}).last_hidden_state
            hidden[:, -1].square().sum().backward()
            states.append([hidden[1:], *(parameter.grad for parameter in trained(model))])
        for found, expected in zip(*reversed(states), strict=True):
            assert_close(found, expected)
        with pytest.raises(RequestRejected, match="is on servers"):
            print(remote.model.layers[0].mlp.up_proj.weight.data)
        assert remote.model.layers[0].self_attn.q_proj.lora_A  # nothing of it was taken away


# ------------------------------------------------------------ what is refused


def test_hooks_on_layers_of_peft_are_refused(servers):
    """They would never run; PEFT registers some itself, to use an adapter for each row."""
    with connected(servers) as remote, torch.no_grad():
        model = get_peft_model(remote, lora(init_lora_weights=False)).eval()
        logits = model(IDS).logits
        for layer in (remote.model.layers[2].self_attn.q_proj, remote.model.layers[0].self_attn.v_proj.lora_A.default):
            hook = layer.register_forward_hook(print)
            with pytest.raises(RequestRejected, match=r"a hook on a layer in .*_proj of block . would never run"):
                model(IDS)
            hook.remove()
        hook = remote.model.layers[2].self_attn.q_proj.register_full_backward_hook(print)
        with model.disable_adapter(), pytest.raises(RequestRejected, match=r"q_proj of block 2 would never run"):
            model(IDS)
        hook.remove()
        assert torch.equal(model(IDS).logits, logits)
        with pytest.raises(RequestRejected, match="would never run"):
            model(IDS, adapter_names=["default"] * len(IDS))


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused(servers, merge):
    with in_peft(servers, lora(("embed_tokens", "q_proj"))) as pair:
        pair.train(2, loss_of(**BATCH))
        with pytest.raises(RequestRejected, match="cannot be merged into blocks that are on servers"):
            getattr(pair.remote, merge)()
        assert_same_logits(pair)
