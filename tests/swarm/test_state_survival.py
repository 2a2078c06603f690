"""Recurrent and convolutional states survive a server: computed again, or handed over with the session."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client import DistributedModel
from tests.swarm.waiting import DEADLINE_S
from tests.zoo import PAD, VOCAB, save_checkpoint

PROMPT = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 12


@pytest.fixture
def checkpoint(request, tmp_path) -> Path:
    save_checkpoint(request.param, tmp_path / request.param)
    return tmp_path / request.param


def swarm_of(checkpoint: Path) -> str:
    return f"states-{checkpoint.name}-{os.getpid()}"


@pytest.fixture
def servers(cluster: LocalCluster, checkpoint: Path) -> Iterator[dict]:
    """By their place: the first blocks, the last ones, and the last ones once more, slower."""
    options = ["--model", str(checkpoint), "--swarm", swarm_of(checkpoint), "--quant", "none"]
    places = {"first": ("0:3", "100"), "last": ("3:6", "100"), "spare": ("3:6", "1")}
    started = {
        place: cluster.start(*options, "--cache-tokens", "16384", "--blocks", blocks, "--throughput", throughput)
        for place, (blocks, throughput) in places.items()
    }
    cluster.wait_ready(list(started.values()))
    yield started
    for server in started.values():
        server.kill()


SURVIVES = pytest.mark.promise("recurrent models survive a death")


@pytest.mark.parametrize(
    ("checkpoint", "ending", "options"),
    [pytest.param("qwen3_next", signal.SIGKILL, {}, marks=SURVIVES), ("jamba", signal.SIGTERM, {"num_beams": 3})],
    indirect=["checkpoint"],
    ids=["killed-greedy", "leaving-beams"],
)
def test_a_server_ends_in_the_midst(servers, checkpoint, ending, options):
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    common = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    with DistributedModel.from_pretrained(str(checkpoint), swarm=swarm_of(checkpoint), draft="none") as remote:
        for model in (whole, remote):
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
        cache, steps = remote.new_cache(), itertools.count()

        def end_in_the_midst(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(steps) == 4:
                servers["last"].signal(ending)
            return scores

        given = {remote._family.cache_argument: cache, "logits_processor": [end_in_the_midst]}
        assert torch.equal(remote.generate(PROMPT, **common, **given), whole.generate(PROMPT, **common))
        stats = cache.session.stats
        assert (stats.recoveries, stats.moves) == ((1, 0) if ending is signal.SIGKILL else (0, 1))
    assert servers["last"].wait_gone(DEADLINE_S)
