"""The square–cube law: the larger the hidden size, the smaller the share of time that stages wait for the wire.

    python benchmarks/square_cube.py [--blocks 1] [--rounds 3] [--gflops N] [--netlab] [--quick] [--json FILE]

What a stage computes for a token grows with the square of the hidden size, what it sends with the hidden size alone
(Ryabinin et al., 2023, section 3). A stage in the middle of a Llama is measured: a forward pass, then a backward pass
that computes it again; seconds of processor time, one thread, fp32. What it sends is counted (``LinkCost``), with
codecs and compression-aware layers. The share is that of a micro-batch alone: wire / (wire + computing); *busy* is how
much of the time the peer computes if enough of them are under way to fill either the peer or its link. Hidden sizes
beyond those that are measured are computed: the time of the largest that was, times the ratio of operations.

``--gflops`` takes a speed of peers as given, and measures nothing. ``--netlab`` measures the share over real links too,
with gRPC and the codecs' own time, to a peer in a network namespace.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import json_row, write_json
from link_cost import LinkCost
from rich.console import Console
from rich.table import Table
from square_cube_link import NoNamespaces, link
from square_cube_stage import MiddleStage, Shape

from swarm_training.stages.compress.layers import BoundaryCompression

HIDDEN = 256, 512, 1024, 2048, 4096
MBIT = 100, 500
ROWS, LENGTH = 2, 128  # of a micro-batch
VARIANTS = (  # layers at the ends of a stage, and how activations and gradients travel
    *(("none", "fp32"), ("none", "bf16"), ("none", "int8")),
    *(("bottleneck:4", "bf16"), ("bottleneck:4", "int8"), ("maxout:2", "bf16"), ("maxout:2", "int8")),
)
NETLAB_HIDDEN = 256, 1024
NETLAB_VARIANTS = ("none", "fp32"), ("none", "int8"), ("bottleneck:4", "int8")
QUICK_MEASURED, ALL_MEASURED = 1024, 4096  # largest hidden size
LAW = -1.0  # wire / computing goes with the hidden size to this power, if all products are equally efficient
MEASURED, COMPUTED, GIVEN = "measured", "computed", "given"


@dataclass(frozen=True)
class Cost:
    """What a stage of this shape computes for a token, and how that is known."""

    shape: Shape
    computing_s: float
    source: str


@dataclass(frozen=True)
class Cell:
    cost: Cost
    codec: str
    mbit: int

    @property
    def link(self) -> LinkCost:
        return LinkCost.of(self.cost.shape.layers, self.cost.shape.hidden_size, self.codec)

    @property
    def share(self) -> float:
        """Of a micro-batch alone."""
        wire_s = self.link.alone_s(self.mbit * 1e6)
        return wire_s / (wire_s + self.cost.computing_s)

    @property
    def busy(self) -> float:
        return min(1.0, self.cost.computing_s / self.link.overlapped_s(self.mbit * 1e6))

    def __str__(self) -> str:
        shape = self.cost.shape
        return f"hidden {shape.hidden_size}, {shape.layers}, {self.codec}, {self.mbit} Mbit/s"


def measured_s(shape: Shape, rounds: int) -> float:
    """Of a token; the fastest round, since others use the machine as well."""
    stage = MiddleStage(shape)
    inputs = random_inputs(shape)

    def both_passes() -> float:
        start = time.process_time()
        with torch.no_grad():
            grad = stage(inputs)
        stage.backward(inputs, grad)
        return time.process_time() - start

    both_passes()  # takes memory
    return min(both_passes() for _ in range(rounds)) / (ROWS * LENGTH)


def random_inputs(shape: Shape) -> torch.Tensor:
    """[rows, length, width], as a stage before it would send them."""
    width = BoundaryCompression.parse(shape.layers).width(shape.hidden_size)
    return torch.randn(ROWS, LENGTH, width, generator=torch.Generator().manual_seed(1))


def costs(layers: str, num_blocks: int, largest: int, rounds: int, gflops: float | None) -> Iterator[Cost]:
    """Of all hidden sizes; those up to ``largest`` are measured."""
    known: Cost | None = None
    for hidden_size in HIDDEN:
        shape = Shape(hidden_size, num_blocks, layers)
        if gflops is not None:
            yield Cost(shape, shape.flops(LENGTH) / (gflops * 1e9), GIVEN)
        elif known is None or hidden_size <= largest:
            known = Cost(shape, measured_s(shape, rounds), MEASURED)
            yield known
        else:
            ratio = shape.flops(LENGTH) / known.shape.flops(LENGTH)
            yield Cost(shape, known.computing_s * ratio, COMPUTED)


# ---------------------------------------------------------------- results


def print_cells(console: Console, cells: list[Cell]) -> None:
    by_place = {(c.mbit, c.cost.shape.hidden_size, c.cost.shape.layers, c.codec): c for c in cells}
    for mbit in MBIT:
        table = Table(
            box=None, title=f"{mbit} Mbit/s: share of time on the wire, alone (busy, overlapped)", title_justify="left"
        )
        for column in ("hidden", "", "ms/token", *(f"{layers} {codec}" for layers, codec in VARIANTS)):
            table.add_column(column, justify="left" if not column else "right")
        for hidden_size in HIDDEN:
            row = [by_place[mbit, hidden_size, *variant] for variant in VARIANTS]
            cost = row[0].cost
            shares = (f"{cell.share:.1%} ({cell.busy:.0%})" for cell in row)
            table.add_row(str(hidden_size), cost.source, f"{1e3 * cost.computing_s:.3f}", *shares)
        console.print(table)
        console.print()


def power(cells: list[Cell]) -> float:
    """By which wire / computing goes with the hidden size, from the smallest to the largest."""
    first, last = cells[0], cells[-1]
    ratios = [cell.link.alone_s(1e8) / cell.cost.computing_s for cell in (first, last)]
    sizes = [cell.cost.shape.hidden_size for cell in (first, last)]
    return math.log(ratios[1] / ratios[0]) / math.log(sizes[1] / sizes[0])


def row(cell: Cell) -> dict[str, Any]:
    return json_row(
        f"{cell}: share of time on the wire",
        cell.share,
        busy=cell.busy,
        computing_s=cell.cost.computing_s,
        received_bytes=cell.link.received_bytes,
        sent_bytes=cell.link.sent_bytes,
        source=cell.cost.source,
    )


def netlab(console: Console, num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Raises NoNamespaces."""
    rows = []
    table = Table(box=None, title="Over real links, micro-batches one by one", title_justify="left")
    for column in ("", "ms/token", "computing", "share on the wire", "by bytes alone"):
        table.add_column(column, justify="left" if not column else "right")
    with link() as connection:
        for hidden_size in NETLAB_HIDDEN:
            for layers, codec in NETLAB_VARIANTS:
                for mbit in MBIT:
                    shape = Shape(hidden_size, num_blocks, layers)
                    connection.set_rate(mbit)
                    share, taken_s, computed_s = connection.wire_share(shape, codec, random_inputs(shape), rounds)
                    cell = Cell(Cost(shape, computed_s, MEASURED), codec, mbit)
                    milliseconds = (f"{1e3 * value:.3f}" for value in (taken_s, computed_s))
                    table.add_row(str(cell), *milliseconds, f"{share:.1%}", f"{cell.share:.1%}")
                    rows.append(
                        json_row(
                            f"{cell}, over a link: share of time on the wire",
                            share,
                            beside=cell.share,
                            taken_s=taken_s,
                            computing_s=computed_s,
                        )
                    )
    console.print(table)
    return rows


# ---------------------------------------------------------------- command line


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    console = Console(highlight=False, width=None if Console().is_terminal else 170)
    largest, rounds = (QUICK_MEASURED, 1) if args.quick else (ALL_MEASURED, args.rounds)
    by_layers = {
        layers: list(costs(layers, args.blocks, largest, rounds, args.gflops))
        for layers in dict.fromkeys(layers for layers, _ in VARIANTS)
    }
    cells = [Cell(cost, codec, mbit) for mbit in MBIT for layers, codec in VARIANTS for cost in by_layers[layers]]
    print_cells(console, cells)
    plain = power(
        [cell for cell in cells if cell.mbit == MBIT[0] and (cell.cost.shape.layers, cell.codec) == VARIANTS[0]]
    )
    console.print(f"wire / computing goes with the hidden size to the power of {plain:.2f}; the law says {LAW:g}\n")
    rows = [row(cell) for cell in cells]
    rows.append(json_row("wire / computing: power of the hidden size", plain, beside=LAW))
    if args.netlab:
        try:
            rows += netlab(console, args.blocks, 2 if args.quick else 5)
        except NoNamespaces as error:
            console.print(
                f"--netlab needs root, iproute2 and network namespaces, which are not to be had here: {error}"
            )
    if args.json:
        write_json(args.json, vars(args), rows=rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=_positive, default=1, metavar="N", help="of a stage")
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="of which the fastest counts")
    parser.add_argument("--gflops", type=float, metavar="N", help="how fast peers compute: nothing is measured")
    parser.add_argument("--netlab", action="store_true", help="measure over links between network namespaces, too")
    parser.add_argument("--quick", action="store_true", help=f"measures hidden sizes up to {QUICK_MEASURED}, once")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.gflops is not None and not 0 < args.gflops < math.inf:
        parser.error(f"--gflops {args.gflops}: expected a number above 0")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"{args.json.parent} is no directory: {args.json.name} cannot be written there")
    return args


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
