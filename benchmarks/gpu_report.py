"""What a GPU does, in one command of at most 12 minutes: tests, steps, prefill, formats, sessions, memory, a profile.

    python benchmarks/gpu_report.py --json gpu-report.json            # make gpu-report
    python benchmarks/gpu_report.py --json gpu-report.json            # again: goes on with the parts that are missing
    python benchmarks/gpu_report.py --quick                           # tiny, on the CPU: shows that it works

The parts come in the order of their value. After each one, the table is printed and the JSON file written, so that a
run that is cut short has still shown something. Times are beside limits measured on the same device: the bytes that a
step reads by the bandwidth of a copy, its products by the rate of a large product, whichever takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import multiprocessing
import os
import pstats
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from common import decode_tokens_per_s, fleet, json_row, random_ids, write_json
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from transformers import AutoModel

from swarm_client import DistributedModel
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_, require_device
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks.blocks import load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_transfer import Stored

ROOT = Path(__file__).parents[1]
TOTAL_S = 12 * 60.0
ROWS, CONTEXTS = (1, 8, 16, 64, 256), (64, 1024)
FORMATS = ("none", "int8", "fp8")  # none: 16 bits
LENGTHS = (128, 512, 2048)
SESSIONS, NEW_TOKENS, PROMPT = (1, 8, 32, 128), 32, 16
MOST_CLIENTS = 12  # processes
TIMED_STEPS = 20
PROFILED_STEPS, SHOWN_FUNCTIONS = 50, 25
QUICK = {
    "model": "bench-tiny",
    "device": "cpu",
    "rows": (1, 4),
    "contexts": (16,),
    "lengths": (64,),
    "sessions": (1, 2),
    "new_tokens": 4,
    "tests": ("tests/unit/server/gpu/test_triton_attention.py",),
}


class TooLong(Exception):
    """A part has used up its time."""


@dataclass(frozen=True)
class Limits:
    """What the device can do, as measured by a large copy and a large product of matrices."""

    bytes_per_s: float
    flop_per_s: float

    def step_s(self, size_bytes: float, flop: float) -> float:
        """Return the least time for reading so many bytes and computing so many products and sums."""
        return max(size_bytes / self.bytes_per_s, flop / self.flop_per_s)


@dataclass
class Device:
    """What the parts measure: the engine with its blocks, loaded at the first use, and the limits of its device."""

    args: argparse.Namespace
    parts: dict[str, Any] = field(default_factory=dict)  # what the parts have found so far, by their names

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @cached_property
    def path(self) -> Path:
        return make_model(self.args.model, self.args.models)

    @cached_property
    def limits(self) -> Limits:
        size, sides = (1 << 30, 8192) if self.device.type == "cuda" else (1 << 26, 512)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.seconds(lambda: target.copy_(source))
        square = torch.ones(sides, sides, dtype=self.dtype, device=self.device)
        product_s = self.seconds(lambda: square @ square)
        return Limits(2 * size / copy_s, 2 * sides**3 / product_s)

    @cached_property
    def engine(self) -> Engine:
        def prepare(block: torch.nn.Module, _index: int) -> None:
            quantize_(block, self.args.quant, self.device, self.dtype)

        checkpoint = ModelCheckpoint.open(self.path)
        return Engine(load_blocks(checkpoint, self.span, dtype=self.dtype, device=self.device, transform=prepare))

    @property
    def span(self) -> Span:
        return Span(0, SHAPES[self.args.model]["num_hidden_layers"])

    @cached_property
    def weights(self) -> int:
        """The number of the blocks' weights in products."""
        shape = {"num_key_value_heads": 4} | SHAPES[self.args.model]
        hidden, wide = shape["hidden_size"], shape["intermediate_size"]
        kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
        return len(self.span) * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide)

    @property
    def weight_bytes(self) -> float:
        return self.weights * {"int8": 1, "int4": 0.5, "fp8": 1}.get(self.args.quant, self.dtype.itemsize)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], times: int = TIMED_STEPS) -> float:
        """Return the median time of a call; three calls before warm up."""
        taken = []
        for number in range(times + 3):
            start = time.perf_counter()
            call()
            self.wait()
            if number >= 3:
                taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def opened(self, num_rows: int, context: int) -> list[Session]:
        """Return sessions of one row each, with so many positions of zeros, which were not computed here."""
        budget, sessions = CacheBudget(2**62, 1), []
        for _ in range(num_rows):
            session = self.engine.open(self.span, 1, budget.lease(""), reserved=context + 64, shares=False)
            size_bytes = sum(group.token_bytes for group in session.layout.groups) * context
            data = torch.zeros(size_bytes, dtype=torch.uint8)
            self.engine.adopt(session, 0, (), Stored(context, (context,) * len(session.layout.groups), data))
            sessions.append(session)
        return sessions

    def step(self, sessions: Sequence[Session], start: int, num_tokens: int = 1) -> None:
        """Compute a step of each session at this position; what they have beyond is dropped."""
        hidden = torch.zeros(1, num_tokens, self.engine.hidden_size, dtype=self.dtype)
        for output in self.engine.run([(session, SessionStep(start, BlockInput(hidden))) for session in sessions]):
            if isinstance(output, Exception):
                raise output

    def close(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self.engine.close(session)


Rows = Iterator[dict[str, Any]]


def limit_rows(device: Device) -> Rows:
    yield json_row("bandwidth", device.limits.bytes_per_s / 1e9, unit="GB/s")
    yield json_row("products", device.limits.flop_per_s / 1e12, unit="TFLOP/s")


def test_rows(device: Device) -> Rows:
    """The tests of ``make test-cuda``, of the files that have any: how many passed, and those that failed by name."""
    every = ROOT.glob("tests/**/test_*.py")
    files = device.args.tests or [str(path) for path in every if "mark.cuda" in path.read_text()]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"--junitxml={report}", *files]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=device.args.part_seconds)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    yield json_row("tests passed", float(len(cases) - len(failed) - len(skipped)), unit="tests")
    yield json_row("tests skipped", float(len(skipped)), unit="tests")
    yield json_row("tests failed", float(len(failed)), 0.0, at_most=True, unit="tests")
    for case in failed:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        name = f"failed: {case.get('classname')}::{case.get('name')}"
        yield json_row(name, 1.0, unit="test", message=(problem.get("message") or "")[:500])


def step_rows(device: Device) -> Rows:
    """One step of some rows after a context: time, beside reading weights, keys and values, or the products."""
    for context in device.args.contexts:
        for num_rows in device.args.rows:
            sessions = device.opened(num_rows, context)
            measured_s = device.seconds(lambda sessions=sessions, start=context: device.step(sessions, start))
            kv_bytes = sum(group.token_bytes for group in sessions[0].layout.groups) * context * num_rows
            limit_s = device.limits.step_s(device.weight_bytes + kv_bytes, 2.0 * device.weights * num_rows)
            device.close(sessions)
            row = limited(f"step, {num_rows} rows, {context} positions", measured_s * 1e3, limit_s * 1e3, "ms")
            yield row | {"num_rows": num_rows, "context": context}


def prefill_rows(device: Device) -> Rows:
    """A prompt of some length, beside its products, and beside transformers with the same blocks in this process."""
    model = None
    for length in device.args.lengths:
        (session,) = device.opened(1, 1)
        measured_s = device.seconds(lambda session=session, length=length: device.step([session], 0, length), 5)
        device.close([session])
        limit_s = device.limits.step_s(device.weight_bytes, 2.0 * device.weights * length)
        yield limited(f"prefill, {length} positions", measured_s * 1e3, limit_s * 1e3, "ms")
        model = model or local_model(device)
        hidden = torch.zeros(1, length, model.config.hidden_size, dtype=device.dtype, device=device.device)
        with torch.inference_mode():
            beside_s = device.seconds(lambda model=model, hidden=hidden: model(inputs_embeds=hidden, use_cache=True), 5)
        name, rates = f"prefill, {length} positions, beside transformers", (length / measured_s, length / beside_s)
        yield json_row(name, rates[0], 1.0, beside=rates[1], ratio=rates[0] / rates[1], unit="tokens/s")


def format_rows(device: Device) -> Rows:
    """Steps of the fewest and of the most rows, and the longest prompt, in each format that the device has."""
    args = device.args
    for quant in FORMATS:
        try:
            require_device(quant, device.device)
        except ValueError as refusal:
            yield json_row(f"{quant} is refused", 0.0, unit="steps", message=str(refusal))
            continue
        other = Device(argparse.Namespace(**vars(args) | {"quant": quant}))
        for num_rows, context in ((min(args.rows), min(args.contexts)), (max(args.rows), min(args.contexts))):
            sessions = other.opened(num_rows, context)
            measured_s = other.seconds(lambda: other.step(sessions, context))  # noqa: B023
            other.close(sessions)
            yield json_row(f"{quant}: step, {num_rows} rows, {context} positions", measured_s * 1e3, unit="ms")
        (session,) = other.opened(1, 1)
        length = max(args.lengths)
        measured_s = other.seconds(lambda: other.step([session], 0, length), 5)  # noqa: B023
        other.close([session])
        yield json_row(f"{quant}: prefill, {length} positions", measured_s * 1e3, unit="ms")


def local_model(device: Device) -> torch.nn.Module:
    """The same blocks in transformers, with weights that were never set: only their time counts."""
    config = ModelCheckpoint.open(device.path).config
    with device.device:
        return AutoModel.from_config(config, dtype=device.dtype).eval()


def session_rows(device: Device) -> Rows:
    """Tokens per second of all sessions through one server, from client processes; then its start and memory."""
    args = device.args
    options = "--cache-tokens", str(max(args.sessions) * 256), "--max-sessions", "1024", "--device", args.device
    with fleet(device.path, 1, args.quant, *options) as servers:
        yield json_row("start to ready, with a warm page cache", servers.start_s, unit="s")
        for num_sessions in args.sessions:
            num_clients = min(num_sessions, MOST_CLIENTS, max(1, (os.cpu_count() or 1) - 2))
            shares = [len(range(number, num_sessions, num_clients)) for number in range(num_clients)]
            rates = from_processes(shares, (str(device.path), servers.swarm, args.device, args.new_tokens))
            yield json_row(f"{num_sessions} sessions, {num_clients} client processes", sum(rates), unit="tokens/s")
        yield json_row("peak memory of the server", servers.peak_memory_bytes / 1e9, unit="GB")
        if device.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device.device)
            yield json_row("GPU memory in use by server and this process", (total - free) / 1e9, unit="GB")


def from_processes(shares: Sequence[int], arguments: tuple[Any, ...]) -> list[float]:
    """Return the tokens per second of each process, which has so many of the sessions; they begin together."""
    context = multiprocessing.get_context("forkserver")  # imports once for all clients
    context.set_forkserver_preload(["gpu_report"])
    together, rates = context.Barrier(len(shares)), context.Queue()
    processes = [context.Process(target=client, args=(together, rates, share, *arguments)) for share in shares]
    try:
        for process in processes:
            process.start()
        found = [rates.get(timeout=300.0) for _ in processes]
    finally:
        for process in processes:
            process.kill()
    for rate in found:
        if isinstance(rate, str):
            raise RuntimeError(f"a client failed: {rate}")
    return found


def client(together: Any, rates: Any, num_sessions: int, path: str, swarm: str, device: str, new_tokens: int) -> None:
    torch.set_num_threads(1)
    options = {} if device == "cpu" else {"device": device, "dtype": torch.bfloat16}
    generator = torch.Generator().manual_seed(os.getpid())
    try:
        with DistributedModel.from_pretrained(path, swarm=swarm, **options) as model:
            decode_tokens_per_s(model, [random_ids(PROMPT, generator)], 2)  # warm-up
            together.wait(240.0)
            prompts = [random_ids(PROMPT, generator) for _ in range(num_sessions)]
            rates.put(decode_tokens_per_s(model, prompts, new_tokens))
    except Exception as error:  # the parent waits for an answer of each client, and says what went wrong
        rates.put(repr(error))


def memory_rows(device: Device) -> Rows:
    """Bytes of the blocks on the device, and what steps of the most rows take besides."""
    if device.device.type != "cuda":
        yield json_row("weights, by their number", device.weight_bytes / 1e9, unit="GB")
        return
    allocated = torch.cuda.memory_allocated(device.device) / 1e9
    sessions = device.opened(max(device.args.rows), max(device.args.contexts))
    device.step(sessions, max(device.args.contexts))
    device.close(sessions)
    yield limited("GPU memory of the blocks", allocated, device.weight_bytes / 1e9, "GB")
    yield json_row("GPU memory, the most so far", torch.cuda.max_memory_allocated(device.device) / 1e9, unit="GB")


def profile_rows(device: Device) -> Rows:
    """Where the time of the worst step goes: Python's functions, and on a GPU its kernels."""
    steps = device.parts.get("steps", {"rows": []})["rows"]
    worst = max(steps, key=lambda row: row["ratio"], default={"num_rows": 1, "context": device.args.contexts[0]})
    num_rows, context = worst["num_rows"], worst["context"]
    sessions = device.opened(num_rows, context)
    device.step(sessions, context)
    profile = cProfile.Profile()
    with profile:
        for _ in range(PROFILED_STEPS):
            device.step(sessions, context)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(SHOWN_FUNCTIONS)
    total_s = pstats.Stats(profile).total_tt  # type: ignore[attr-defined]
    name = f"profile, {num_rows} rows, {context} positions"
    yield json_row(name, total_s * 1e3 / PROFILED_STEPS, unit="ms", functions=text.getvalue().splitlines())
    if device.device.type == "cuda":
        with torch.profiler.profile() as kernels:
            for _ in range(PROFILED_STEPS):
                device.step(sessions, context)
            device.wait()
        found = kernels.key_averages().table(sort_by="cuda_time_total", row_limit=SHOWN_FUNCTIONS)
        yield json_row(f"{name}, kernels", float(PROFILED_STEPS), unit="steps", functions=found.splitlines())
    device.close(sessions)


PARTS: dict[str, Callable[[Device], Rows]] = {  # in the order of their value
    "limits": limit_rows,
    "tests": test_rows,
    "steps": step_rows,
    "prefill": prefill_rows,
    "formats": format_rows,
    "sessions": session_rows,
    "memory": memory_rows,
    "profile": profile_rows,
}


def limited(name: str, measured: float, limit: float, unit: str) -> dict[str, Any]:
    """Return a row with the least that the device needs beside it."""
    return json_row(name, measured, beside=limit, ratio=measured / limit, unit=unit)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'':58} {'measured':>10} {'beside':>10} {'ratio':>7}  met"]
    for row in rows:
        numbers = [row["measured"], row["beside"], row["ratio"]]
        cells = ["" if value is None else f"{value:.4g}" for value in numbers]
        what = f"{row['name']}, {row['unit']}"
        lines.append(f"{what:58} {cells[0]:>10} {cells[1]:>10} {cells[2]:>7}  {row['met'] or ''}")
    return lines


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in the context once it has taken so long."""

    def stop(*_: object) -> None:
        raise TooLong(f"cut short after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def run_part(device: Device, name: str, seconds: float) -> dict[str, Any]:
    """Return the part's rows, those before an error too. An error or a cut is told; the next run makes it again."""
    rows: list[dict[str, Any]] = []
    start, error = time.monotonic(), None
    try:
        with at_most(seconds):
            for row in PARTS[name](device):
                rows.append(row)
                print(*table([row])[1:], sep="\n", flush=True)
    except Exception as problem:  # the other parts are still worth their time
        error = f"{type(problem).__name__}: {problem}"
        traceback.print_exc()
    return {"rows": rows, "error": error, "seconds": time.monotonic() - start}


def earlier(file: Path | None) -> dict[str, Any]:
    """Return the parts that an earlier run has written to this file."""
    if file is None or not file.exists():
        return {}
    parts: dict[str, Any] = json.loads(file.read_text()).get("parts", {})
    return parts


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that no earlier run has completed; first those that none has tried."""
    deadline = time.monotonic() + args.seconds
    parts = earlier(args.json)
    device = Device(args, parts)
    missing = [name for name in args.parts if name not in parts]
    missing += [name for name in args.parts if name in parts and parts[name]["error"]]
    for name in missing:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        print(f"\n{name} ({left_s:.0f} s are left)", flush=True)
        parts[name] = run_part(device, name, min(left_s, args.part_seconds))
        rows = [row for part in parts.values() for row in part["rows"]]
        print("", *table(rows), sep="\n", flush=True)
        if args.json:
            write_json(args.json, vars(args), rows=rows, parts=parts)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-8b-quarter", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--quant", default="int8", choices=("none", "int8", "int4", "fp8"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all parts; none begins later")
    parser.add_argument("--part-seconds", type=float, default=240.0, help="for each part")
    parser.add_argument("--quick", action="store_true", help="bench-tiny on the CPU: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each part; its parts are not repeated")
    args = parser.parse_args()
    vars(args).update(rows=ROWS, contexts=CONTEXTS, lengths=LENGTHS, sessions=SESSIONS, new_tokens=NEW_TOKENS, tests=())
    if args.quick:
        vars(args).update(QUICK)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no CUDA device; --quick runs on the CPU")
    torch.set_num_threads(1)
    parts = report(args)
    undone = [name for name in args.parts if name not in parts or parts[name]["error"]]
    if undone:
        sys.exit(f"not complete: {', '.join(undone)}; the same command goes on with them")


if __name__ == "__main__":
    main()
