"""Training through servers beside local Hugging Face and PEFT: how fast a step is, and what it costs.

    python benchmarks/finetune.py [--model bench-models/bench-1b] [--rounds 3] [--only fp32|int8] [--json FILE]

Two servers hold half of the blocks each, one core each; the local model computes in fp32 with one thread. A step is the
forward and backward pass of 4 rows of 64 tokens; nothing is updated. Rounds are taken in turns (A B A B).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import torch
from common import QUANT_NAMES, fleet, load_local, median_ratio, take_turns, write_json
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from swarm_client import DistributedModel

ROWS, TOKENS, NUM_PROMPT_TOKENS = 4, 64, 8
TARGET, ADAPTER_TARGET = 1.6, 0.9  # of the local model's speed; of the frozen pass's
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
_MEMORY = """
import sys, torch
from swarm_client import DistributedModel
with DistributedModel.from_pretrained(sys.argv[1], swarm=sys.argv[2]) as model:
    ids = torch.randint(3, 100, (4, 64))
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    model(inputs_embeds=hidden, labels=ids).loss.backward()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ratio`` is to the local model with the same adapter, or to what the name says."""

    what: str
    tokens_per_s: float
    ratio: float | None = None
    target: float | None = None
    bytes_per_token: float | None = None


def step(model: nn.Module, *, backward: bool = True) -> float:
    """Tokens per second of one pass; with frozen blocks, gradients of the input are asked for."""
    ids = torch.randint(3, 1000, (ROWS, TOKENS))
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        loss = model(inputs_embeds=hidden, labels=ids).loss
    if backward:
        loss.backward()
    return ROWS * TOKENS / (time.perf_counter() - start)


class LocalPrompts(nn.Module):
    """Prompts that are added before every block of a local model, in plain PyTorch."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        size = NUM_PROMPT_TOKENS, model.config.hidden_size
        self.prompts = nn.ParameterList(torch.zeros(size) for _ in model.model.layers)
        self._model = [model]

    def get_input_embeddings(self) -> nn.Module:
        return self._model[0].get_input_embeddings()

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor):
        """With as many virtual tokens before the real ones as the swarm's client has."""
        model = self._model[0]
        hooks = [
            block.register_forward_pre_hook(
                lambda _block, inputs, prompt=prompt: (_with(inputs[0], prompt), *inputs[1:])
            )
            for block, prompt in zip(model.model.layers, self.prompts, strict=True)
        ]
        try:
            virtual = torch.zeros(len(labels), NUM_PROMPT_TOKENS, inputs_embeds.shape[-1])
            ignored = torch.full((len(labels), NUM_PROMPT_TOKENS), -100)
            return model(inputs_embeds=torch.cat([virtual, inputs_embeds], 1), labels=torch.cat([ignored, labels], 1))
        finally:
            for hook in hooks:
                hook.remove()


def _with(hidden: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden[:, : len(prompt)] + prompt, hidden[:, len(prompt) :]], 1)


@contextmanager
def local_models(path: Path) -> Iterator[dict[str, nn.Module]]:
    """By what is trained; they share their weights."""
    frozen, wrapped = load_local(path).requires_grad_(False), load_local(path)
    yield {
        "frozen": frozen,
        "LoRA": peft.get_peft_model(wrapped, peft.LoraConfig(**LORA)),
        "deep prompts": LocalPrompts(frozen),
    }


def loopback_bytes() -> int:
    """Received by this machine from itself so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def measure(path: Path, quant: str, rounds: int, local: dict[str, nn.Module]) -> Iterator[Row]:
    with fleet(path, 2, quant) as servers, servers.client() as frozen, servers.client() as lora:
        lora.add_adapter(peft.LoraConfig(**LORA))
        options = {"tuning_mode": "deep_prompt", "num_prompt_tokens": NUM_PROMPT_TOKENS}
        with DistributedModel.from_pretrained(str(path), swarm=servers.swarm, **options) as prompts:
            remote: dict[str, nn.Module] = {"frozen": frozen, "LoRA": lora, "deep prompts": prompts}
            contestants: dict[str, Callable[[], float]] = {}
            for name, model in remote.items():
                step(model)  # warm-up
                contestants[f"local {name}"] = lambda name=name: step(local[name])
                contestants[f"remote {name}"] = lambda model=model: step(model)
            contestants["remote forward"] = lambda: step(frozen, backward=False)
            measured = take_turns(rounds, contestants)
            traffic = {}
            for name, model in remote.items():
                before = loopback_bytes()
                step(model)
                traffic[name] = (loopback_bytes() - before) / ROWS / TOKENS
        kind = QUANT_NAMES[quant]
        for name in remote:
            values, beside = measured[f"remote {name}"], measured[f"local {name}"]
            yield Row(f"local fp32, {name}", statistics.median(beside))
            ratio = median_ratio(values, beside)
            yield Row(f"swarm {kind}, {name}", statistics.median(values), ratio, TARGET, traffic[name])
        for name in ("LoRA", "deep prompts"):
            ratio = median_ratio(measured[f"remote {name}"], measured["remote frozen"])
            yield Row(
                f"swarm {kind}, {name}, beside frozen",
                statistics.median(measured[f"remote {name}"]),
                ratio,
                ADAPTER_TARGET,
            )
        yield Row(f"swarm {kind}, forward alone", statistics.median(measured["remote forward"]))
        print(
            f"{kind}: client's peak memory {client_memory_mb(path, servers.swarm):.0f} MB, one frozen step", flush=True
        )


def client_memory_mb(path: Path, swarm: str) -> float:
    """Of a process of its own."""
    command = [sys.executable, "-c", _MEMORY, str(path), swarm]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("bench-models/bench-1b"), metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--only", choices=sorted(QUANT_NAMES.values()), help="one kind of servers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not args.model.is_dir():
        parser.error(f"{args.model} is no directory: make it with `python benchmarks/make_model.py {args.model.name}`")
    rows: list[Row] = []
    with local_models(args.model) as local:
        for quant, kind in QUANT_NAMES.items():
            if args.only in (None, kind):
                rows += measure(args.model, quant, args.rounds, local)
                gc.collect()
    table = Table("", "tokens/s", "ratio", "target", "bytes per token", title=f"{ROWS} x {TOKENS} tokens", box=None)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"≥ {row.target:g}"
        traffic = "" if row.bytes_per_token is None else f"{row.bytes_per_token:,.0f}"
        table.add_row(row.what, f"{row.tokens_per_s:.1f}", ratio, target, traffic)
    Console(highlight=False).print(table)
    if args.json:
        write_json(args.json, vars(args), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
