"""Machines without any copy of the model: a server is killed twice while it fetches it, and clients ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client.model.model import DistributedModel
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

NUM_BLOCKS, HALF = 6, 3
RATE = "30MB"  # per second: slow enough to be killed in between


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 110 MB, in two files: several pieces for each block."""
    directory = tmp_path_factory.mktemp("models") / "large"
    sizes = dict(hidden_size=512, intermediate_size=2560, num_attention_heads=8, num_key_value_heads=8)
    save_checkpoint("llama", directory, max_shard_size="60MB", num_hidden_layers=NUM_BLOCKS, **sizes)
    return directory


def verified(cache: Path) -> dict[str, set[int]]:
    """The pieces that are there, by file."""
    marks = cache.glob("swarm/hub/models--large/blobs/*.pieces")
    return {path.name: {index for index, mark in enumerate(path.read_bytes()) if mark} for path in marks}


def count(cache: Path) -> int:
    return sum(map(len, verified(cache).values()))


def test_a_machine_without_a_copy_is_killed_twice(
    model: Path, tmp_path: Path, server_process, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--quant", "none", "--throughput", "100", "--cache-tokens", "2000", "--swarm", "lending")
    has, lacks = tmp_path / "has", tmp_path / "lacks"
    for cache in (has, lacks):
        cache.mkdir()
    first = server_process(
        "--model", str(model), "--blocks", f"0:{HALF}", "--share-weights", RATE, *common, cache=has, wait=True
    )
    joining = ("--initial-peers", first.ready["peer"], "--blocks", f"{HALF}:{NUM_BLOCKS}", *common)
    before: dict[str, set[int]] = {}
    for least in (3, 5):
        killed = server_process(*joining, cache=lacks, wait=False)
        wait_for(lambda least=least: count(lacks) >= least, f"{least} pieces have come")
        killed.kill()
        assert not killed.stdout  # it was not ready
        after = verified(lacks)
        assert all(after[name] >= pieces for name, pieces in before.items())
        before = after
    second = server_process(*joining, cache=lacks)
    assert second.ready["model"] == "large" and second.ready["blocks"] == f"{HALF}:{NUM_BLOCKS}"
    assert "from members of the swarm (1 at present)" in second.stderr
    assert all(verified(lacks)[name] >= pieces for name, pieces in before.items())

    prompt = torch.tensor([[5, 17, 3, 99, 42]])
    local = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = local.generate(prompt, max_new_tokens=12, do_sample=False)
    with DistributedModel.from_pretrained(model, [first.ready["peer"]], "lending", draft="none") as remote:
        assert remote.generate(prompt, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()

    cache = tmp_path / "client"  # of a client without a copy
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with DistributedModel.from_pretrained("swarm://", [second.ready["peer"]], "lending", draft="none") as remote:
        assert remote.generate(prompt, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()
    assert 0 < count(cache) < count(lacks)  # embeddings, norm and head
