"""What torch imports for others waits in a server, and is all there once somebody asks, in whatever order."""

from __future__ import annotations

import random
import subprocess
import sys

from swarm_protocol.imports.light_imports import FOR_OTHERS
from tests.marks import SLOW

USES = {
    "torch.export": "export",
    "torch.masked": "masked_tensor",
    "torch.nn.intrinsic": "ConvReLU2d",
    "torch.nn.qat": "Linear",
    "torch.nn.quantizable": "LSTM",
    "torch.nn.quantized": "Linear",
    "torch.optim": "AdamW",
    "torch.profiler": "profile",
    "torch.quantization": "QConfig",
    "torch.utils.data": "DataLoader",
}
# Imports once, and asks in each order in a process of its own.
SCRIPT = """
import os, sys
from swarm_protocol.imports.late_modules import has_run
from swarm_protocol.imports.light_imports import import_transformers
import_transformers()
import torch
orders = {orders}
print(*(name for name, _ in orders[0] if has_run(name)), flush=True)
for order in orders:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status == 0
        continue
    for name, what in order:
        getattr(sys.modules[name], what)
    print(all(has_run(name) for name, _ in order), flush=True)
    if order != orders[-1]:
        os._exit(0)
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    os._exit(0)
"""
TEXT = """
import sys
from swarm_protocol.imports.late_modules import has_run
from swarm_protocol.imports.light_imports import import_for_text
import_for_text()
import swarm_cli.chat.chat, swarm_gateway.web.models, swarm_client.generation.generation, swarm_client.model.model
print(*(name for name in {heavy} if has_run(name)))
import torch
from swarm_client.generation.generation import load_tokenizer
tokenizer = load_tokenizer()
tokenizer.chat_template = "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
print(tokenizer.apply_chat_template([{{"role": "user", "content": "a b"}}], tokenize=False))
layer = torch.nn.Linear(2, 2)
print(torch.equal(torch.compile(layer, backend="eager")(torch.ones(2)), layer(torch.ones(2))), has_run("torch._dynamo"))
from torch.distributed.tensor import DTensor
"""
HEAVY = ["torch._dynamo", "torch.distributed.tensor", "torch.export", "sympy", "scipy", "PIL"]
HEAVY += ["torch._meta_registrations", "torch._prims", "torch._decomp"]


def test_a_command_that_writes_text_does_without_what_is_for_others() -> None:
    result = subprocess.run([sys.executable, "-c", TEXT.format(heavy=HEAVY)], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["", "a b", "True True"], result.stderr


def test_every_package_is_tried() -> None:
    assert set(USES) == set(FOR_OTHERS)


@SLOW
def test_they_wait_and_can_be_asked_in_any_order() -> None:
    orders = [random.Random(seed).sample(list(USES.items()), len(USES)) for seed in range(2)]
    script = SCRIPT.format(orders=orders)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["", "True", "True"] and result.returncode == 0, result.stderr
