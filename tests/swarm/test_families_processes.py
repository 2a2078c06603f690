"""Families hosted by server processes, and every family loaded with what such a process has imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client import DistributedModel
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from tests.exact_types import around_blocks
from tests.splitting import require_that_a_client_loads_its_own
from tests.swarm.waiting import DEADLINE_S
from tests.zoo import BLOCKS, CONFIGS, PAD, SUPPORTED, VOCAB, save_checkpoint

PROMPT, NEW = 11, 3
TOLERANCE = 1e-4  # relative; the zoo's large weights amplify rounding, by which servers differ (oneDNN, other batches)
FAMILIES = list({CONFIGS[name][0]: name for name in SUPPORTED}.values())  # one of each
IN_PROMISE = ["llama", "gpt_oss", "qwen3_next", "bamba"]  # all positions, windows, two kinds of states
OTHERS = [name for name in FAMILIES if name not in IN_PROMISE]
# Computes the blocks of each directory with its hidden states; a server imports the same before it loads a model.
COMPUTE = """
import sys
from swarm_protocol.imports.light_imports import import_transformers
import_transformers()
import swarm_server.node.server
import torch
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
end, *directories = sys.argv[1:]
for directory in directories:
    stack = load_blocks(ModelCheckpoint.open(directory), Span(0, int(end)))
    with torch.inference_mode():
        torch.save(stack(torch.load(f"{directory}/hidden.pt")), f"{directory}/output.pt")
"""


@pytest.mark.promise("every family that is named is hosted by server processes")
def test_server_processes(cluster: LocalCluster, tmp_path: Path) -> None:
    for name in IN_PROMISE:
        save_checkpoint(name, tmp_path / name)
    servers = [cluster.start(*flags(tmp_path / name)) for name in IN_PROMISE]
    try:
        cluster.wait_ready(servers)
        for name in IN_PROMISE:
            check(tmp_path / name)
            require_that_a_client_loads_its_own(tmp_path / name)
    finally:
        for server in servers:
            server.kill()
            server.wait_gone(DEADLINE_S)


def test_every_family_is_computed_with_what_a_server_has_imported(tmp_path: Path) -> None:
    """Servers import parts of transformers only, and its code of a family when they load it."""
    expected = {}
    for name in OTHERS:
        save_checkpoint(name, tmp_path / name)
        family, whole = ModelCheckpoint.open(tmp_path / name).family, local_model(tmp_path / name)
        base = next(module for module in whole.modules() if isinstance(module, family.base_class))
        mask, positions = torch.ones(2, PROMPT, dtype=torch.long), torch.arange(PROMPT).expand(2, -1)
        hidden, expected[name] = around_blocks(base, family, prompt(), mask, positions)
        torch.save(hidden, tmp_path / name / "hidden.pt")
    command = [sys.executable, "-c", COMPUTE, str(BLOCKS), *(str(tmp_path / name) for name in OTHERS)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in OTHERS:
        require_close(torch.load(tmp_path / name / "output.pt"), expected[name], name)


def swarm_of(checkpoint: Path) -> str:
    return f"families-{os.getpid()}-{checkpoint.name}"


def flags(checkpoint: Path) -> list[str]:
    options = ["--quant", "none", "--throughput", "100", "--cache-tokens", "2048"]
    return ["--model", str(checkpoint), "--swarm", swarm_of(checkpoint), "--blocks", f"0:{BLOCKS}", *options]


def require_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCE, f"{name}: {error}"


def check(directory: Path) -> None:
    """A client writes what the local model writes, and has its logits with a cache and without."""
    whole, ids = local_model(directory), prompt()
    with DistributedModel.from_pretrained(str(directory), swarm=swarm_of(directory), draft="none") as remote:
        remote.generation_config = whole.generation_config
        known = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(remote.generate(ids, **known), whole.generate(ids, **known))
        with torch.no_grad():
            expected = whole(ids).logits
            for use_cache in (True, False):
                require_close(remote(ids, use_cache=use_cache).logits, expected, directory.name)


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(0))


def local_model(directory: Path) -> PreTrainedModel:
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    whole.generation_config.eos_token_id, whole.generation_config.pad_token_id = None, PAD
    return whole
