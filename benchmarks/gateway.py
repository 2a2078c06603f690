"""How fast ``swarm serve`` is with many streams, beside ``transformers serve`` in the same run, by the openai client.

    python benchmarks/gateway.py                       # bench-1b, 2 servers on one core each; 1, 8, 32 and 128 streams
    python benchmarks/gateway.py --quick               # bench-tiny, to see that it works
    python benchmarks/gateway.py --only client         # what the client's own work costs, without HTTP
    python benchmarks/gateway.py --mixed --beside /path/to/older/checkout   # mixed prompts: see gateway_mixed.py

The contestants take turns (A B A B); who waits computes nothing. Every stream asks for as many tokens; after
``--window`` seconds what has come until then counts. ``client``: processor time of the client's process, by token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gateway_mixed
import httpx
import numpy
from common import QUANT_NAMES, Fleet, fleet, json_row, random_ids, table_of, write_json
from make_model import DEFAULT_OUTPUT, SHAPES, add_tokenizer, make_model
from openai import AsyncOpenAI
from rich.console import Console
from transformers import GenerationConfig

from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import FinishReason, Item, Request, Token

PROMPT = 16  # tokens
CACHE_TOKENS = 32768  # of each server
CLIENT_STREAMS = 16
TARGETS = {1: 1.0, 32: 8.0}  # tokens/s, in those of transformers serve
MOST_CPU_MS = 1.5  # of the client, by token and stream
MOST_STREAMS = 256
START_TIMEOUT_S = 300.0
QUICK = {"model": "bench-tiny", "rounds": 1, "new_tokens": 8, "streams": [1, 8], "window": 20.0}
SWARM, PEER, PEER_BATCHING = "swarm serve", "transformers serve", "transformers serve --continuous-batching"


@dataclass
class Stream:
    """When its tokens came, in seconds after all were sent."""

    times_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


@dataclass(frozen=True)
class Measured:
    """``first_s``: median, with the window for who has seen none; gaps: between tokens of one stream."""

    tokens_per_s: float
    first_s: float
    gap_p50_s: float
    gap_p99_s: float

    @classmethod
    def of(cls, streams: Sequence[Stream], window_s: float) -> Measured:
        lasted_s = max((stream.times_s[-1] for stream in streams if stream.times_s), default=window_s)
        gaps = [gap for stream in streams for gap in stream.gaps_s] or [window_s]
        return cls(
            sum(len(stream.times_s) for stream in streams) / lasted_s,
            statistics.median(stream.times_s[0] if stream.times_s else window_s for stream in streams),
            *numpy.percentile(gaps, [50, 99]),
        )


# ------------------------------------------------------------ contestants


@dataclass(frozen=True)
class HttpServer:
    """A server process that answers at ``url``, which ends with ``/v1``."""

    url: str
    pid: int


@contextlib.contextmanager
def http_server(
    command: Sequence[str], threads: int, root: Path | None = None, log_file: Path | None = None
) -> Iterator[HttpServer]:
    """Start a server at a port of its own, and yield it once it answers.

    ``root``: the checkout whose code runs, if it is not that of the working directory.
    """
    port = free_port()
    command = [*command, "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") if log_file is None else open(log_file, "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=root)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5).is_success:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield HttpServer(f"{url}/v1", process.pid)
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def swarm_serve(servers: Fleet, head_quant: str) -> contextlib.AbstractContextManager[HttpServer]:
    options = ["--model", str(servers.path), "--swarm", servers.swarm, "--head-quant", head_quant]
    limits = ["--max-active", str(MOST_STREAMS), "--max-queued", str(MOST_STREAMS)]
    command = [sys.executable, "-m", "swarm_client", "serve", *options, *limits]
    return http_server(command, threads=1)


def transformers_serve(path: Path, *options: str) -> contextlib.AbstractContextManager[HttpServer]:
    """float32 on all cores, as the checkpoint is."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(path)]
    return http_server([*command, "--device", "cpu", *options], threads=len(os.sched_getaffinity(0)))


# ------------------------------------------------------------ streams over HTTP


async def run_streams(url: str, model: str, num_streams: int, new_tokens: int, window_s: float) -> list[Stream]:
    streams = [Stream() for _ in range(num_streams)]
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=START_TIMEOUT_S, max_retries=0) as client:
        start_s = time.perf_counter()

        async def run(stream: Stream) -> None:
            prompt = " ".join(f"w{token}" for token in random_ids(PROMPT)[0].tolist())
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=new_tokens, temperature=0, stream=True
            )
            async with answer:
                async for chunk in answer:
                    num_tokens = len(re.findall(r"w\d", chunk.choices[0].text)) if chunk.choices else 0
                    stream.times_s += [time.perf_counter() - start_s] * num_tokens

        tasks = [asyncio.create_task(run(stream)) for stream in streams]
        done, late = await asyncio.wait(tasks, timeout=window_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
    return streams


def until_idle(url: str, model: str) -> None:
    """What was cancelled is gone when a new request is answered."""
    asyncio.run(run_streams(url, model, 1, 1, START_TIMEOUT_S))


# ------------------------------------------------------------ the client's own work


class _Decoding:
    """Listens to generations that run at the same time: what happens from when all have begun until one ends."""

    def __init__(self, num_streams: int) -> None:
        self._waiting = num_streams  # for their first tokens
        self.num_tokens = 0
        self.cpu_s = 0.0  # processor time of this process, all threads
        self.is_over = threading.Event()
        self.error: BaseException | None = None

    def begun(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.cpu_s = -time.process_time()

    def token(self) -> None:
        self.num_tokens += not self._waiting

    def ended(self, reason: FinishReason | BaseException) -> None:
        if not self.is_over.is_set():
            self.error = reason if isinstance(reason, BaseException) else None
            self.cpu_s += time.process_time()
            self.is_over.set()


class _Stream:
    """A listener of one generation."""

    def __init__(self, decoding: _Decoding) -> None:
        self._decoding = decoding
        self._has_begun = False
        self.has_ended = threading.Event()

    def __call__(self, item: Item | BaseException) -> None:
        if isinstance(item, str | BaseException):
            self._decoding.ended(item)
            self.has_ended.set()
        elif isinstance(item, Token) and not self._has_begun:
            self._has_begun = True
            self._decoding.begun()
        elif isinstance(item, Token) and not self._decoding.is_over.is_set():
            self._decoding.token()


def client_ms_per_token(loop: GenerationLoop, num_streams: int, new_tokens: int) -> float:
    """Processor time by token, while all streams decode."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    decoding = _Decoding(num_streams)
    streams = [_Stream(decoding) for _ in range(num_streams)]
    for stream in streams:
        loop.submit(Request(tuple(random_ids(PROMPT)[0].tolist()), config), stream)
    for stream in streams:
        stream.has_ended.wait()
    if decoding.error is not None:
        raise decoding.error
    return decoding.cpu_s * 1e3 / max(1, decoding.num_tokens)


def measure_client(servers: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with servers.client(args.head_quant) as model, contextlib.closing(GenerationLoop(model)) as loop:
        for num_streams in (1, CLIENT_STREAMS):
            client_ms_per_token(loop, num_streams, args.new_tokens)  # threads, connections
            found = [client_ms_per_token(loop, num_streams, args.new_tokens) for _ in range(args.rounds)]
            target = MOST_CPU_MS if num_streams == CLIENT_STREAMS else None
            name = f"client's processor time, ms/token at {num_streams} streams"
            yield json_row(name, statistics.median(found), target, at_most=True)


def measure_streams(servers: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    path = servers.path
    with contextlib.ExitStack() as stack:
        model = str(path)
        urls = {SWARM: stack.enter_context(swarm_serve(servers, args.head_quant)).url}
        urls[PEER] = stack.enter_context(transformers_serve(path)).url
        if not args.no_continuous_batching:
            urls[PEER_BATCHING] = stack.enter_context(transformers_serve(path, "--continuous-batching")).url
        for url in urls.values():
            until_idle(url, model)
        for num_streams in args.streams:
            rounds: dict[str, list[Measured]] = {name: [] for name in urls}
            for _ in range(args.rounds):
                for name, url in urls.items():
                    found = asyncio.run(run_streams(url, model, num_streams, args.new_tokens, args.window))
                    rounds[name].append(Measured.of(found, args.window))
                    until_idle(url, model)
            yield from _rows(num_streams, rounds)


def _rows(num_streams: int, rounds: dict[str, list[Measured]]) -> Iterator[dict[str, Any]]:
    def median(name: str, what: str) -> float:
        return statistics.median(getattr(found, what) for found in rounds[name])

    for peer in rounds:
        if peer == SWARM:
            continue
        beside = f" beside {peer}"
        pairs = zip(rounds[SWARM], rounds[peer], strict=True)
        ratio = statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
        yield json_row(
            f"{num_streams} streams, tokens/s{beside}",
            median(SWARM, "tokens_per_s"),
            TARGETS.get(num_streams) if peer == PEER else None,
            beside=median(peer, "tokens_per_s"),
            ratio=ratio,
        )
        for what, field_name in (("first token", "first_s"), ("gap p50", "gap_p50_s"), ("gap p99", "gap_p99_s")):
            ours, theirs = median(SWARM, field_name), median(peer, field_name)
            yield json_row(f"{num_streams} streams, {what}, s{beside}", ours, beside=theirs, ratio=ours / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        help=f"one of {', '.join(SHAPES)}, or, with --mixed, a directory; bench-1b, or bench-100m with --mixed",
    )
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--only", nargs="+", default=["client", "streams"], choices=["client", "streams"])
    parser.add_argument("--head-quant", default="int8", choices=QUANT_NAMES)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", help="1 8 32 128 if not given, 64 with --mixed")
    parser.add_argument("--mixed", action="store_true", help="only streams of mixed prompts, without a peer")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="with --mixed: its servers and gateway take turns"
    )
    parser.add_argument("--workers", type=int, default=1, help="with --mixed: processes of the gateway")
    parser.add_argument("--seconds", type=float, default=180.0, help="with --mixed: of one run")
    parser.add_argument(
        "--server-cores", type=float, help="with --mixed: cores of each server, as on a machine of its own; needs root"
    )
    parser.add_argument(
        "--keys", type=int, default=1, choices=[1, 2], help="with --mixed: 2: some streams have another"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--window", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--no-continuous-batching", action="store_true", help="leave out that mode of the peer")
    parser.add_argument("--quick", action="store_true", help="bench-tiny, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.streams = args.streams or ([64] if args.mixed else [1, 8, 32, 128])
    args.model = args.model or ("bench-100m" if args.mixed else "bench-1b")
    if args.quick:
        vars(args).update(gateway_mixed.QUICK | {"model": QUICK["model"]} if args.mixed else QUICK)
    if args.mixed:
        _report(args, gateway_mixed.measure_mixed_streams(_checkpoint(args), args, http_server))
    else:
        _report(args, _measured(_checkpoint(args), args))


def _measured(path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    measures = {"client": measure_client, "streams": measure_streams}
    with fleet(path, args.servers, "int8", "--cache-tokens", str(CACHE_TOKENS)) as servers:
        for name in args.only:
            yield from measures[name](servers, args)


def _checkpoint(args: argparse.Namespace) -> Path:
    if args.mixed and Path(args.model).is_dir():
        return Path(args.model).resolve()
    if args.model not in SHAPES:
        raise SystemExit(f"--model is {args.model}: expected one of {', '.join(SHAPES)}")
    path = make_model(args.model, args.models).resolve()
    add_tokenizer(path)
    return path


def _report(args: argparse.Namespace, measured: Iterator[dict[str, Any]]) -> None:
    rows = []
    for row in measured:
        rows.append(row)
        print(row["name"], row["measured"], flush=True)
    Console().print(table_of(rows))
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
