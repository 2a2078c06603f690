"""Models that see: the vision tower is here, the language model's blocks are on servers, and the text is the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, GenerationConfig

from swarm_client import NoRoute
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import Request
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.node.server import Server
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import Pair, connected
from tests.swarm.test_batching import Heard
from tests.swarm.tuning import Tuned, assert_close, lora
from tests.vision_zoo import (
    BOTH_WAYS,
    FIRST_PICTURE_TOKEN,
    SEEING,
    TOKENS_PER_PICTURE,
    load_seeing,
    save_seeing,
    with_pictures,
    with_text,
    words,
)
from tests.zoo import BLOCKS

SPANS = ("0:2", "2:6")
ROUNDING = 1e-5
GREEDY = {"do_sample": False, "max_new_tokens": 10}
WITHOUT_BEAMS = ("llama4",)  # transformers does not repeat its pictures for beams
PREFIXED = ("paligemma", "paligemma-2")
IN_PROMISE = ("llava", "qwen2_vl")  # positions in a row, and on three axes
OF_EACH_KIND = (*IN_PROMISE, "qwen3_vl")  # and additions between blocks


def of_models(*names: str) -> pytest.MarkDecorator:
    marks = pytest.mark.promise("a model that sees writes what the local model writes")
    return pytest.mark.parametrize(
        "pair", [pytest.param(name, marks=marks) if name in IN_PROMISE else name for name in names], indirect=True
    )


@pytest.fixture
def name(request) -> str:
    return request.node.callspec.params["pair"]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory) -> Iterator[SeeingPair]:
    directory = tmp_path_factory.mktemp(request.param)
    save_seeing(request.param, directory)
    with served(directory) as pair:
        yield pair


@dataclass(frozen=True)
class SeeingPair(Pair):
    """The whole model, and the same model through servers; ``started`` are the first servers, of ``SPANS``."""

    started: list[Server]


@contextmanager
def served(directory: Path, *, wait_timeout_s: float | None = None, **options: Any) -> Iterator[SeeingPair]:
    """``options``: of the servers. ``wait_timeout_s``: of the client."""
    with InProcessServers(directory, cache_tokens=16384, memory_dht=True) as servers:
        started = servers.start(*SPANS, **options)
        with connected(servers, **({} if wait_timeout_s is None else {"wait_timeout_s": wait_timeout_s})) as remote:
            yield SeeingPair(load_seeing(directory), remote, servers, started)


@of_models(*SEEING)
def test_the_whole_path(pair, name):
    """Hidden states after every block, logits with and without a cache, beams, and gradients of the vision tower."""
    given = with_pictures(name, rows=2)
    attended = given["attention_mask"].bool()
    with torch.no_grad():
        whole = pair.whole(**given, output_hidden_states=True)
        for use_cache in (False, True):
            remote = pair.remote(**given, use_cache=use_cache, output_hidden_states=True)
            for found, expected in zip(remote.hidden_states, whole.hidden_states, strict=True):
                assert_close(found[attended], expected[attended], ROUNDING)
            assert_close(remote.logits[attended], whole.logits[attended], ROUNDING)
    beams = {} if name in WITHOUT_BEAMS else {"num_beams": 2}
    assert torch.equal(*(model.generate(**given, **beams, **GREEDY) for model in (pair.whole, pair.remote)))
    grads = []
    for model in (pair.whole, pair.remote):
        pixels = given["pixel_values"].clone().requires_grad_(True)
        model(**given | {"pixel_values": pixels}).logits[attended].square().sum().backward()
        grads.append(pixels.grad)
    assert grads[0].abs().max() > 0
    assert_close(grads[1], grads[0], 1e-4)


@of_models(*SEEING)
def test_text_alone(pair, name):
    """A PaliGemma's prompt sees all of itself with ``token_type_ids``, and only what is before without."""
    for given in (with_text(name, 11), {"input_ids": words(1, 11)})[: 2 if name in PREFIXED else 1]:
        assert torch.equal(*(model.generate(**given, **GREEDY) for model in (pair.whole, pair.remote)))


@of_models(*BOTH_WAYS)
def test_two_pictures_in_a_prompt(pair, name):
    """Positions of one picture do not see those of the next, unless the whole prompt sees itself."""
    given = with_pictures(name, rows=2, per_row=2)
    attended = given["attention_mask"].bool()
    with torch.no_grad():
        whole, remote = (model(**given, use_cache=True).logits[attended] for model in (pair.whole, pair.remote))
    assert_close(remote, whole, ROUNDING)
    assert torch.equal(*(model.generate(**given, **GREEDY) for model in (pair.whole, pair.remote)))


@pytest.mark.parametrize("pair", ["gemma3"], indirect=True)
def test_a_picture_in_a_later_call(pair, name):
    """It sees what an earlier call has computed, and is computed as the stock model does with a cache."""
    given = with_pictures(name, rows=1)
    ids, first = given.pop("input_ids"), FIRST_PICTURE_TOKEN - 2
    logits = []
    for model in (pair.whole, pair.remote):
        with torch.no_grad():
            past = model(ids[:, :first], use_cache=True).past_key_values
            logits.append(model(ids[:, first:], **given, past_key_values=past).logits)
    assert_close(logits[1], logits[0], ROUNDING)


@pytest.mark.parametrize("name", ["gemma3", "paligemma-2"])  # in windows, and across them
def test_steps_that_are_shorter_than_a_picture(tmp_path, name):
    """No step ends within a picture, nor does one of a session that is replayed to servers."""
    save_seeing(name, tmp_path)
    given = with_pictures(name, rows=2, per_row=2)
    attended = given["attention_mask"].bool()
    following = {"input_ids": words(2, 3), "attention_mask": torch.cat([attended, attended.new_ones(2, 3)], 1).long()}
    with served(tmp_path, chunk_tokens=2 * (TOKENS_PER_PICTURE - 1)) as pair, torch.no_grad():
        whole, remote = (model(**given, use_cache=True) for model in (pair.whole, pair.remote))
        assert_close(remote.logits[attended], whole.logits[attended], ROUNDING)
        remote.past_key_values.session.close()
        logits = [
            model(**following, past_key_values=output.past_key_values).logits
            for model, output in ((pair.whole, whole), (pair.remote, remote))
        ]
        assert_close(logits[1], logits[0], ROUNDING)


def test_servers_of_an_older_version_compute_text_alone(tmp_path, monkeypatch):
    """They would ignore what sees later positions, and say so by a field that their records do not have."""
    save_seeing("gemma3", tmp_path)
    given = with_pictures("gemma3", rows=1)
    announced = ServerRecord.to_proto

    def of_older_version(record: ServerRecord) -> pb.ServerRecord:
        message = announced(record)
        message.ClearField("joins")
        return message

    monkeypatch.setattr(ServerRecord, "to_proto", of_older_version)
    with served(tmp_path, wait_timeout_s=0.0) as pair:
        text = with_text("gemma3", 11)
        assert torch.equal(*(model.generate(**text, **GREEDY) for model in (pair.whole, pair.remote)))
        with pytest.raises(NoRoute, match="2 servers of an older version"):
            pair.remote.generate(**given, **GREEDY)


@pytest.mark.parametrize("pair", [*OF_EACH_KIND, "gemma3"], indirect=True)
def test_a_loop_of_many_generations(pair, name):
    """One with a picture and two of words alone, at once; the gateway computes them so."""
    given = with_pictures(name, rows=1)
    ids, others = given.pop("input_ids"), {key: value for key, value in given.items() if key != "attention_mask"}
    config = GenerationConfig(**GREEDY)
    asked = [Request(tuple(ids[0].tolist()), config, pictures=others)]
    asked += [Request(tuple(words(1, length, seed=length)[0].tolist()), config) for length in (7, 12)]
    with GenerationLoop(pair.remote) as loop:
        heard = [Heard() for _ in asked]
        for request, listener in zip(asked, heard, strict=True):
            loop.submit(request, listener)
        found = [listener.ids for listener in heard]
    for request, new in zip(asked, found, strict=True):
        prompt = torch.tensor([request.prompt])
        expected = pair.whole.generate(prompt, **request.pictures, **GREEDY)
        assert [*request.prompt, *new] == expected[0].tolist()


@pytest.mark.parametrize("pair", ["qwen3_vl"], indirect=True)
def test_pictures_in_turns(pair, name):
    """Two pictures at once, then another one where the cache goes on."""
    turns = [with_pictures(name, rows=1, per_row=2), with_pictures(name, rows=1)]
    found = []
    for model, cache in ((pair.whole, DynamicCache()), (pair.remote, pair.remote.new_cache())):
        logits, length = [], 0
        for turn in turns:
            num_tokens = turn["input_ids"].shape[1]
            places = torch.arange(length, length + num_tokens).expand(4, 1, -1)
            with torch.no_grad():
                given = {key: value for key, value in turn.items() if key != "attention_mask"}
                logits.append(model(**given, position_ids=places, past_key_values=cache).logits)
            length += num_tokens
        found.append(torch.cat(logits, 1))
    assert_close(found[1], found[0], ROUNDING)


def test_an_adapter_of_the_language_model_is_trained_on_pictures(tmp_path):
    """The vision tower has layers of the same names, which stay as they are."""
    save_seeing("llava", tmp_path)
    given = with_pictures("llava", rows=2)
    with served(tmp_path) as pair:
        config = lora(exclude_modules=pair.remote.outside_blocks())
        torch.manual_seed(0)
        local = get_peft_model(pair.whole, copy.deepcopy(config))
        torch.manual_seed(0)
        pair.remote.add_adapter(config)
        both = Tuned(local, pair.remote)
        assert all(len(parameters) == 2 * 2 * BLOCKS for parameters in both.parameters)
        both.train(2, lambda model: model(**given, labels=given["input_ids"]).loss)
        both.assert_same_weights()
        both.assert_same_logits(**given)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_names_of_older_checkpoints(tmp_path, name):
    """Before its version 4.52, transformers wrote the language model under other names."""
    save_seeing(name, tmp_path)
    renamed = {
        "llava": {
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.": "",
        },
        "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    }[name]

    def old(tensor: str) -> str:
        beginning = next((new for new in renamed if tensor.startswith(new)), None)
        return tensor if beginning is None else renamed[beginning] + tensor.removeprefix(beginning)

    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for shard in set(content["weight_map"].values()):
        tensors = load_file(tmp_path / shard)
        save_file({old(tensor): value for tensor, value in tensors.items()}, tmp_path / shard, {"format": "pt"})
    content["weight_map"] = {old(tensor): shard for tensor, shard in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    given = with_pictures(name, rows=1)
    with served(tmp_path) as pair:
        assert torch.equal(*(model.generate(**given, **GREEDY) for model in (pair.whole, pair.remote)))
