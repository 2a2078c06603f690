"""How far honest servers of different kernels and quantisations are apart, beside liars, in units of the bounds.

Honest servers compute the same spans of the same models over the same inputs: float32, bfloat16, int8 by fbgemm with
the instructions of this machine, with those of AVX2 (in a process of its own), int8 on plain tensors, and LLM.int8() in
float32 and bfloat16, as on GPUs; int4 with the kernel and without; fp8 in float32 and bfloat16, as on GPUs. Every pair
is compared as checks do, and over probes as evidence is judged. An honest pair must stay below 1, a lie must come out
above.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import json_row, write_json
from transformers import AutoModelForCausalLM, logging

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.kernels import int4_linear
from swarm_models.kernels.int8_linear import FbgemmWeight, PlainWeight
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import Bounds, Comparison, RoundingKind
from swarm_protocol.verification.evidence import SEED_BYTES, probe, sketch_excess
from swarm_protocol.verification.statements import sketch_of
from swarm_server.blocks.blocks import BlockStack, load_blocks

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.zoo import save_checkpoint

AVX2 = {
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
HERE = ("fp32", "bf16", "int8", "int8-plain", "llm-int8", "llm-int8-bf16", "int4", "int4-plain", "fp8", "fp8-bf16")
THERE = ("fp32", "int8", "int4")
KINDS = {
    "fp32": RoundingKind("none", "float32"),
    "bf16": RoundingKind("none", "bfloat16"),
    "int8": RoundingKind("int8", "float32"),
    "int8-plain": RoundingKind("int8", "float32"),
    "int4": RoundingKind("int4", "float32"),
    "int4-plain": RoundingKind("int4", "float32"),
    "fp8": RoundingKind("fp8", "float32", "cuda"),
    "fp8-bf16": RoundingKind("fp8", "bfloat16", "cuda"),
    "llm-int8": RoundingKind("int8", "float32", "cuda"),  # what GPUs do, here by bitsandbytes on the CPU
    "llm-int8-bf16": RoundingKind("int8", "bfloat16", "cuda"),
}
METHODS = {"llm-int8": "bnb-int8", "llm-int8-bf16": "bnb-int8"}
FAMILIES = ("shipped", "llama", "bloom", "falcon-7b", "mistral-sliding", "gemma2", "phi", "mixtral", "qwen3_moe")
FAMILIES += ("gpt_neox", "mamba2", "qwen3")
LIES = (
    "scaled by 1.01",
    "update by 1.01",
    "1.01 in the middle",
    "zeros",
    "stale",
    "noise of 10 %",
    "last block left out",
)
LIES += ("another model's weights", "zeros in one answer of ten")
TOKENS, SEED = 24, b"directions"
LIE_ROWS = 2  # of those that honest servers are compared over


@dataclass
class Tally:
    """In units of the bounds: the most that honest pairs differ, and the least that liars do."""

    honest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lies: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    num_honest: int = 0


def stack_of(path: Path, kind: str) -> BlockStack:
    checkpoint, expected = ModelCheckpoint.open(path), KINDS[kind]
    dtype = getattr(torch, expected.dtype)
    int8 = {"int8": FbgemmWeight, "int8-plain": PlainWeight}.get(kind)
    int4 = int4_linear.PlainInt4Weight if kind == "int4-plain" else None

    def transform(module: torch.nn.Module, _index: int) -> None:
        method = METHODS.get(kind, expected.quant)
        quantize_(module, method, torch.device("cpu"), dtype, int8_weight=int8, int4_weight=int4, emulated=True)

    return load_blocks(checkpoint, Span(0, checkpoint.family.num_blocks), dtype=dtype, transform=transform)


@torch.inference_mode()
def through(stack: BlockStack, span: Span, hidden: torch.Tensor) -> torch.Tensor:
    return stack.view(span)(hidden.to(stack.dtype)).float()


def checkpoint_of(family: str, directory: Path, seed: int = 0) -> Path:
    if family == "shipped":
        return Path(locate(DEFAULT_MODEL))
    path = directory / f"{family}-{seed}"
    if not path.exists():
        save_checkpoint(family, path, seed=seed)
    return path


def compute(directory: Path, family: str, kinds: list[str], file: Path) -> None:
    """Outputs of every span, by kind; in a process that may have other instructions."""
    cases = torch.load(directory / "cases.pt")
    outputs = {}
    for kind in kinds:
        stack = stack_of(checkpoint_of(family, directory), kind)
        outputs[kind] = [through(stack, Span(*span), inputs) for span, inputs in cases]
    torch.save(outputs, file)


def cases_of(stack: BlockStack, embedded: torch.Tensor) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """Spans of 1 … n blocks, each with inputs as they come out of the blocks before."""
    num_blocks = stack.num_blocks
    spans = {(0, 1), (1, 2), (1, 3), (num_blocks // 2, num_blocks), (0, num_blocks)}
    probes = torch.cat([probe(bytes([row] * SEED_BYTES), embedded.shape[-1]).hidden for row in range(len(embedded))])
    cases = [(span, through(stack, Span(0, span[0]), embedded) if span[0] else embedded) for span in sorted(spans)]
    return [*cases, *((span, probes) for span in sorted(spans))]


def embedded_by(path: Path, num_rows: int) -> tuple[torch.Tensor, bool]:
    """Inputs of the first block, [rows, tokens, hidden_size]; and whether the model has experts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.randint(3, 100, (num_rows, TOKENS), generator=torch.Generator().manual_seed(0))
    hidden = model.get_input_embeddings()(ids).detach()
    if model.config.model_type.startswith("gemma"):
        hidden = hidden * model.config.hidden_size**0.5
    return hidden, any("expert" in name for name in model.config.to_dict())


def lies_about(
    stack: BlockStack, other: BlockStack | None, span: Span, inputs: torch.Tensor, true: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    middle = (span.start + span.end + 1) // 2
    if middle < span.end:
        yield LIES[2], through(stack, Span(middle, span.end), 1.01 * through(stack, Span(span.start, middle), inputs))
    update = true - inputs
    noise = torch.randn(true.shape, generator=generator) * update.norm(dim=-1, keepdim=True) / true.shape[-1] ** 0.5
    yield LIES[0], 1.01 * true
    yield LIES[1], inputs + 1.01 * update
    yield LIES[3], torch.zeros_like(true)
    yield LIES[4], true.roll(1, 0)
    yield LIES[5], true + 0.1 * noise
    yield LIES[6], through(stack, Span(span.start, span.end - 1), inputs) if len(span) > 1 else inputs
    if other is not None:
        yield LIES[7], through(other, span, inputs)
    rare = torch.arange(true.shape[1]) % 10 == 5
    yield LIES[8], torch.where(rare[:, None], 0.0, true)


def excess_in_check(inputs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, bounds: Bounds) -> float:
    return Comparison.of(inputs, ours, theirs).excess(bounds)


def excess_in_evidence(inputs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, bounds: Bounds) -> float:
    """``ours``: what a server has signed; ``theirs``: what another computes."""
    change = (theirs - inputs).double().norm(dim=-1)
    return sketch_excess(sketch_of(theirs, SEED), sketch_of(ours, SEED), change, bounds)


def measure(family: str, directory: Path, num_rows: int, tally: Tally) -> None:
    path = checkpoint_of(family, directory)
    embedded, routed = embedded_by(path, num_rows)
    truth = stack_of(path, "fp32")
    cases = cases_of(truth, embedded)
    torch.save(cases, directory / "cases.pt")
    outputs: dict[str, list[torch.Tensor]] = {}
    for name, kinds, environment in (("", HERE, {}), ("-avx2", THERE, AVX2)):
        file = directory / f"outputs{name}.pt"
        command = [sys.executable, __file__, "--compute", str(directory), family, ",".join(kinds), str(file)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        outputs |= {kind + name: tensors for kind, tensors in torch.load(file).items()}
    liars = {kind: stack_of(path, kind) for kind in ("fp32", "int8")}
    other = {
        kind: None if family == "shipped" else stack_of(checkpoint_of(family, directory, 1), kind) for kind in liars
    }
    for number, (edges, inputs) in enumerate(cases):
        span = Span(*edges)
        lies = {
            kind: list(lies_about(stack, other[kind], span, inputs, outputs[kind][number]))
            for kind, stack in liars.items()
        }
        for ours, theirs in itertools.combinations(outputs, 2):
            kinds = [KINDS[name.removesuffix("-avx2")] for name in (ours, theirs)]
            bounds = Bounds.of(kinds[0], kinds[1], len(span), routed)
            group = "same kind" if kinds[0] == kinds[1] and kinds[0].is_repeatable else "other kind"
            group = "coarse" if bounds.is_wide else group
            is_probe = number >= len(cases) // 2
            if is_probe and routed:
                continue  # there is no evidence of such models
            group = f"evidence, {group}" if is_probe else group
            excess_of = excess_in_evidence if is_probe else excess_in_check
            pair = f"{group}, {ours} beside {theirs}"
            for x, a, b in zip(inputs, outputs[ours][number], outputs[theirs][number], strict=True):
                tally.honest[pair] = max(tally.honest[pair], excess_of(x, a, b, bounds))
                tally.num_honest += 1
            length = "1 block" if len(span) == 1 else "2 to 3 blocks" if len(span) < 4 else "more blocks"
            for name, tensors in lies.get(ours, ()):
                for x, a, b, _ in zip(inputs, tensors, outputs[theirs][number], range(LIE_ROWS), strict=False):
                    tally.lies[group, name, length].append(excess_of(x, a, b, bounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12, help="inputs per model, span and pair of servers")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="two families, few rows: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compute", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if args.compute:
        directory, family, kinds, file = args.compute
        return compute(Path(directory), family, kinds.split(","), Path(file))
    if args.quick:
        args.rows, args.families = 3, ["llama", "mixtral"]
    tally = Tally()
    with tempfile.TemporaryDirectory() as directory:
        for family in args.families:
            measure(family, Path(directory), args.rows, tally)
            print(
                f"{family}: {tally.num_honest} honest comparisons, at most {max(tally.honest.values()):.2f}", flush=True
            )
    rows = [json_row(f"honest, {pair}", excess, 1.0, at_most=True) for pair, excess in sorted(tally.honest.items())]
    rows += [
        json_row(f"{lie}, {length}, {group}", sum(excess > 1 for excess in found) / len(found), lowest=min(found))
        for (group, lie, length), found in sorted(tally.lies.items())
    ]
    print(f"\n{tally.num_honest} honest comparisons; the most, in units of the bound:")
    for pair, excess in sorted(tally.honest.items()):
        print(f"  {pair:48} {excess:8.3f}")
    print(f"\n{'lies: share found, and the least':64} {'found':>8} {'least':>8}")
    for (group, lie, length), found in sorted(tally.lies.items()):
        share = sum(excess > 1 for excess in found) / len(found)
        print(f"  {f'{lie}, {length}, {group}':62} {share:8.0%} {min(found):8.2f}")
    if args.json:
        write_json(args.json, vars(args), rows=rows, num_honest=tally.num_honest)
    if max(tally.honest.values()) >= 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
