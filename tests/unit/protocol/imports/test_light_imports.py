"""What torch imports for others waits in a server, and is all there once somebody asks, in whatever order."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from swarm_protocol.imports.light_imports import FOR_OTHERS

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
SCRIPT = """
import sys
from swarm_protocol.imports.late_modules import has_run
from swarm_protocol.imports.light_imports import import_transformers
import_transformers()
import torch
uses = {uses}
print(*(name for name in uses if has_run(name)))
for name, what in uses.items():
    getattr(sys.modules[name], what)
print(all(map(has_run, uses)))
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_every_package_is_tried() -> None:
    assert set(USES) == set(FOR_OTHERS)


@pytest.mark.parametrize("seed", range(3))
def test_they_wait_and_can_be_asked_in_any_order(seed: int) -> None:
    order = list(USES.items())
    random.Random(seed).shuffle(order)
    script = SCRIPT.format(uses=dict(order))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["", "True"]
