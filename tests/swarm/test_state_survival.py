"""Recurrent and convolutional states survive a server: computed again, or handed over with the session."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client import DistributedModel
from tests.swarm.waiting import DEADLINE_S
from tests.zoo import PAD, VOCAB, save_checkpoint

PROMPT = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 12
WAYS = {"greedy": {}, "beams": {"num_beams": 3}}
ENDINGS = {"killed": signal.SIGKILL, "leaving": signal.SIGTERM}


@pytest.fixture
def name(request) -> str:
    return request.param


@pytest.fixture
def checkpoint(name, tmp_path) -> str:
    save_checkpoint(name, tmp_path / name)
    return str(tmp_path / name)


@pytest.fixture
def servers(cluster: LocalCluster, checkpoint: str, name: str) -> Iterator[dict]:
    """By their place: the first blocks, the last ones, and the last ones once more, slower."""
    options = ["--model", checkpoint, "--swarm", f"states-{name}-{os.getpid()}", "--quant", "none"]
    places = {"first": ("0:3", "100"), "last": ("3:6", "100"), "spare": ("3:6", "1")}
    started = {
        place: cluster.start(*options, "--cache-tokens", "16384", "--blocks", blocks, "--throughput", throughput)
        for place, (blocks, throughput) in places.items()
    }
    cluster.wait_ready(list(started.values()))
    yield started
    for server in started.values():
        server.kill()


@pytest.mark.parametrize(
    ("name", "ending", "way"),
    [
        pytest.param("qwen3_next", "killed", "greedy", marks=pytest.mark.promise("recurrent models survive a death")),
        ("jamba", "leaving", "beams"),
    ],
    indirect=["name"],
)
def test_a_server_ends_in_the_midst(servers, checkpoint, name, ending, way):
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    common = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **WAYS[way])
    with DistributedModel.from_pretrained(checkpoint, swarm=f"states-{name}-{os.getpid()}", draft="none") as remote:
        for model in (whole, remote):
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
        cache, steps = remote.new_cache(), itertools.count()

        def end_in_the_midst(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(steps) == 4:
                servers["last"].signal(ENDINGS[ending])
            return scores

        given = {remote._family.cache_argument: cache, "logits_processor": [end_in_the_midst]}
        assert torch.equal(remote.generate(PROMPT, **common, **given), whole.generate(PROMPT, **common))
        stats = cache.session.stats
        assert (stats.recoveries, stats.moves) == ((1, 0) if ending == "killed" else (0, 1))
    assert servers["last"].wait_gone(DEADLINE_S)
