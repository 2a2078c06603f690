"""Training through servers beside local Hugging Face and PEFT: how fast a step is, and what it costs.

    python benchmarks/finetune.py [--model bench-models/bench-1b] [--rounds 3] [--only fp32|int8] [--json FILE]
    python benchmarks/finetune.py --part beside-frozen  # one part of it, each within two minutes
    python benchmarks/finetune.py --quick               # bench-tiny, one round, to see that it works

Two servers hold half of the blocks each, one core each; the local model computes in fp32 with one thread. A step is the
forward and backward pass of 4 rows of 64 tokens; nothing is updated. Rounds are taken in turns (A B A B). The client
computes the head with two threads, while the servers wait for it.

Other servers have no room to keep anything between forward and backward, so they compute the forward twice. A second
table says what the passes of one block cost. Beside frozen blocks, the positions of virtual tokens count too, and an
optimizer changes LoRA before some steps, so that it travels to the servers again.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import peft
import torch
from common import QUANT_NAMES, Fleet, fleet, json_row, load_local, median_ratio, take_turns, write_json
from make_model import DEFAULT_OUTPUT, make_model
from pass_costs import RANK, TARGETS, TOKENS, PassCost, pass_costs
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from swarm_client import DistributedModel

ROWS, NUM_PROMPT_TOKENS = 4, 8  # rows of TOKENS each
TARGET, ADAPTER_TARGET = 1.6, 0.9  # of the local model's speed; of the frozen pass's
NO_ROOM = ("--cache-tokens", "1")  # nor for keys and values, which training does not need
PARTS = ("beside-local", "beside-frozen", "nothing-kept", "memory", "passes")
LORA = {"r": RANK, "target_modules": list(TARGETS)}
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
    """One line of the table; ``ratio`` is to ``beside``: local with the same adapter, or what the name says."""

    what: str
    tokens_per_s: float
    beside: float | None = None
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


@contextmanager
def remote_models(path: Path, quant: str, *arguments: str) -> Iterator[tuple[Fleet, dict[str, nn.Module]]]:
    """By what is trained, over servers of their own; warm."""
    options = {"tuning_mode": "deep_prompt", "num_prompt_tokens": NUM_PROMPT_TOKENS}
    with ExitStack() as cleanup:
        servers = cleanup.enter_context(fleet(path, 2, quant, *arguments))
        frozen, lora = (cleanup.enter_context(servers.client()) for _ in range(2))
        prompts = DistributedModel.from_pretrained(str(path), swarm=servers.swarm, **options)
        cleanup.enter_context(prompts)
        frozen.requires_grad_(False)
        lora.add_adapter(peft.LoraConfig(**LORA))
        models = {"frozen": frozen, "LoRA": lora, "deep prompts": prompts}
        for model in models.values():
            step(model)
        yield servers, models


def measure(path: Path, quant: str, rounds: int, parts: Sequence[str]) -> Iterator[Row]:
    if "beside-local" in parts:
        yield from beside_local(path, quant, rounds)
    if "beside-frozen" in parts:
        yield from beside_frozen(path, quant, rounds)
    if "nothing-kept" in parts:
        yield from nothing_kept(path, quant, rounds)
    if "memory" in parts:
        with fleet(path, 2, quant) as servers:
            memory_mb = client_memory_mb(path, servers.swarm)
        print(f"{QUANT_NAMES[quant]}: client's peak memory {memory_mb:.0f} MB, one frozen step", flush=True)


def beside_local(path: Path, quant: str, rounds: int) -> Iterator[Row]:
    kind = QUANT_NAMES[quant]
    with local_models(path) as local, remote_models(path, quant) as (_, remote):
        contestants: dict[str, Callable[[], float]] = {}
        for name, model in remote.items():
            contestants[f"local {name}"] = lambda name=name: with_threads(1, lambda: step(local[name]))
            contestants[f"remote {name}"] = lambda model=model: with_threads(2, lambda: step(model))
        traffic = Traffic()
        measured = take_turns(rounds, traffic.counted(contestants))
        for name in remote:
            values, beside = measured[f"remote {name}"], measured[f"local {name}"]
            yield Row(f"local fp32, {name}, beside swarm {kind}", statistics.median(beside))
            ratio = median_ratio(values, beside)
            yield Row(
                f"swarm {kind}, {name}",
                statistics.median(values),
                statistics.median(beside),
                ratio,
                TARGET,
                traffic.per_token[f"remote {name}"],
            )


def beside_frozen(path: Path, quant: str, rounds: int) -> Iterator[Row]:
    kind = QUANT_NAMES[quant]
    with remote_models(path, quant) as (_, remote):
        optimizer = torch.optim.AdamW([p for p in remote["LoRA"].parameters() if p.requires_grad], lr=1e-4)

        def changed() -> float:
            optimizer.step()
            return step(remote["LoRA"])

        contestants: dict[str, Callable[[], float]] = {
            "frozen": lambda: step(remote["frozen"]),
            "LoRA": lambda: step(remote["LoRA"]),
            "LoRA, changed before": changed,
            "deep prompts": lambda: step(remote["deep prompts"]),
            "forward alone": lambda: step(remote["frozen"], backward=False),
        }
        contestants = {name: partial(with_threads, 2, work) for name, work in contestants.items()}
        traffic = Traffic()
        measured = take_turns(rounds, traffic.counted(contestants))
        frozen = measured["frozen"]
        for name in contestants:
            positions = TOKENS + NUM_PROMPT_TOKENS if name == "deep prompts" else TOKENS
            values = [value * positions / TOKENS for value in measured[name]]
            is_adapter = name not in ("frozen", "forward alone")
            yield Row(
                f"swarm {kind}, {name}" + (", beside frozen" if is_adapter else ", beside adapters"),
                statistics.median(values),
                statistics.median(frozen) if is_adapter else None,
                median_ratio(values, frozen) if is_adapter else None,
                ADAPTER_TARGET if is_adapter else None,
                traffic.per_token[name],
            )


def nothing_kept(path: Path, quant: str, rounds: int) -> Iterator[Row]:
    kind = QUANT_NAMES[quant]
    with remote_models(path, quant) as (_, remote), remote_models(path, quant, *NO_ROOM) as (_, forgetful):
        models = {"kept": remote["LoRA"], "nothing kept": forgetful["LoRA"]}
        contestants = {name: partial(with_threads, 2, partial(step, model)) for name, model in models.items()}
        traffic = Traffic()
        measured = take_turns(rounds, traffic.counted(contestants))
        yield Row(
            f"swarm {kind}, LoRA, nothing kept, beside kept",
            statistics.median(measured["nothing kept"]),
            statistics.median(measured["kept"]),
            median_ratio(measured["nothing kept"], measured["kept"]),
            bytes_per_token=traffic.per_token["nothing kept"],
        )


class Traffic:
    """Bytes per token that this machine has received from itself in steps."""

    def __init__(self) -> None:
        self.per_token: dict[str, float] = {}  # of the last one, by what was measured

    def counted(self, contestants: dict[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
        return {name: partial(self._count, name, work) for name, work in contestants.items()}

    def _count(self, name: str, work: Callable[[], float]) -> float:
        before = loopback_bytes()
        value = work()
        self.per_token[name] = (loopback_bytes() - before) / ROWS / TOKENS
        return value


def with_threads(number: int, measure: Callable[[], float]) -> float:
    torch.set_num_threads(number)
    try:
        return measure()
    finally:
        torch.set_num_threads(1)


def client_memory_mb(path: Path, swarm: str) -> float:
    """Of a process of its own."""
    command = [sys.executable, "-c", _MEMORY, str(path), swarm]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("bench-models/bench-1b"), metavar="DIR")
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="where --quick makes its model"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS, help="some of it; each takes a minute or two"
    )
    parser.add_argument("--only", choices=sorted(QUANT_NAMES.values()), help="one kind of servers")
    parser.add_argument("--quick", action="store_true", help="bench-tiny, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.model, args.rounds = make_model("bench-tiny", args.models), 1
    if not args.model.is_dir():
        parser.error(f"{args.model} is no directory: make it with `python benchmarks/make_model.py {args.model.name}`")
    rows: list[Row] = []
    costs: list[PassCost] = []
    for quant, kind in QUANT_NAMES.items():
        if args.only in (None, kind):
            rows += measure(args.model, quant, args.rounds, args.part)
            costs += pass_costs(args.model, quant) if "passes" in args.part else ()
            gc.collect()
    table = Table("", "tokens/s", "ratio", "target", "bytes per token", title=f"{ROWS} x {TOKENS} tokens", box=None)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"≥ {row.target:g}"
        traffic = "" if row.bytes_per_token is None else f"{row.bytes_per_token:,.0f}"
        table.add_row(row.what, f"{row.tokens_per_s:.1f}", ratio, target, traffic)
    passes = Table(
        "", "forward", "keeping", "back", "backward", "MB kept", title=f"ms per block, 1 x {TOKENS} tokens", box=None
    )
    for cost in costs:
        times = (cost.forward, cost.recorded, cost.back, cost.recomputed, cost.kept_mb)
        passes.add_row(cost.what, *(f"{value:.1f}" for value in times))
    Console(highlight=False).print(table, "", passes)
    if args.json:
        written = [
            json_row(
                row.what,
                row.tokens_per_s,
                row.target,
                beside=row.beside,
                ratio=row.ratio,
                bytes_per_token=row.bytes_per_token,
            )
            for row in rows
        ]
        write_json(args.json, vars(args), rows=written, passes=[asdict(cost) for cost in costs])


if __name__ == "__main__":
    main()
