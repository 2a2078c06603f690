"""Families hosted by server processes, and every family loaded with what such a process has imported."""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import decode
from swarm_protocol.wire.constants import WIRE_VERSION
from tests.splitting import require_that_a_client_loads_its_own
from tests.swarm.raw_client import RawClient
from tests.swarm.target import wire
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
    servers = [start(cluster, tmp_path / name) for name in IN_PROMISE]
    try:
        cluster.wait_ready(servers)
        for name, server in zip(IN_PROMISE, servers, strict=True):
            check(server, tmp_path / name)
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
        (hidden,), (expected[name],) = local_generation(tmp_path / name, 1)
        torch.save(hidden, tmp_path / name / "hidden.pt")
    command = [sys.executable, "-c", COMPUTE, str(BLOCKS), *(str(tmp_path / name) for name in OTHERS)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in OTHERS:
        require_close(torch.load(tmp_path / name / "output.pt"), expected[name], name)


def start(cluster: LocalCluster, checkpoint: Path) -> LocalServer:
    where = ["--model", str(checkpoint), "--swarm", f"families-{os.getpid()}-{checkpoint.name}"]
    options = ["--quant", "none", "--throughput", "100", "--cache-tokens", "2048"]
    return cluster.start(*where, "--blocks", f"0:{BLOCKS}", *options)


def require_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCE, f"{name}: {error}"


def check(server: LocalServer, directory: Path) -> None:
    """Generates with the local model, and has the server compute what its blocks computed."""
    inputs, outputs = local_generation(directory)
    checkpoint = ModelCheckpoint.open(directory)
    contract = pb.Contract(
        wire_version=WIRE_VERSION,
        model=checkpoint.name,
        revision=checkpoint.revision,
        blocks=pb.Span(start=0, end=BLOCKS),
    )
    opening = pb.Open(contract=contract, session_key=secrets.token_bytes(16), batch_size=len(inputs[0]))
    requests, length = [pb.SessionRequest(open=opening)], 0
    for number, hidden in enumerate(inputs, 1):
        step = pb.Step(number=number, start_position=length, hidden=wire(hidden))
        requests.append(pb.SessionRequest(step=step))
        length += hidden.shape[1]
    with RawClient(record_of(server, checkpoint)) as client:
        answer = client.session(*requests, pb.SessionRequest(close=pb.Close()))
        steps = [decode(reply.output.hidden) for reply in answer.replies if reply.HasField("output")]
        without_cache = client.forward(pb.ForwardRequest(forward=pb.Forward(contract=contract, hidden=wire(inputs[0]))))
    assert len(steps) == len(outputs), answer
    for output, expected in zip([*steps, decode(without_cache.replies[0].output)], [*outputs, outputs[0]], strict=True):
        require_close(output, expected, directory.name)


def local_generation(directory: Path, num_new: int = NEW) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the prompt and each new token, what goes into the first block and what comes out of the last."""
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    whole.generation_config.eos_token_id, whole.generation_config.pad_token_id = None, PAD
    family = ModelCheckpoint.open(directory).family
    base = next(module for module in whole.modules() if isinstance(module, family.base_class))
    blocks: nn.ModuleList = getattr(family.owner_of(base), family.blocks)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    blocks[0].register_forward_pre_hook(
        lambda _block, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    blocks[-1].register_forward_hook(
        lambda _block, _args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, use_cache=True)
    return inputs, outputs


def record_of(server: LocalServer, checkpoint: ModelCheckpoint) -> ServerRecord:
    """Enough of the server's record to call it."""
    host, port = server.ready["grpc"].split(":")
    certificate = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))
    return ServerRecord(
        server.peer_id,
        (server.ready["grpc"],),
        model=checkpoint.name,
        revision=checkpoint.revision,
        num_blocks=BLOCKS,
        span=Span(0, BLOCKS),
        tls_fingerprint=hashlib.sha256(certificate).digest(),
    )
