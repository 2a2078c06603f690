"""Many streams of mixed prompts at ``swarm serve``: who waits how long, and whether equal requests get equally much.

Run by ``gateway.py --mixed``. Three servers: two of them hold the same half of the model, one the other half. Each
stream asks again as soon as it has its answer. All get the same requests, each stream in an order of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
from common import json_row
from cpu_share import cpu_share
from local_servers import cpu_s_of, local_servers
from make_model import SHAPES
from openai import AsyncOpenAI
from repository import ROOT

from swarm_gateway.app.serving import SERVING_ON

WORDS = (10, 20, 60, 200, 500)  # of prompts
ENGLISH = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot word but what
some we can out other were all there when up use your how said an each she which do their time if will way about many
then them write would like so these her long make thing see him two has look more day could go come
"""
NEW_TOKENS = (8, 26, 44, 62, 80)
KEYS = ("many-streams", "few-streams")
FEW = 8  # one in so many streams is of the second key, and has short prompts alone
CACHE_TOKENS = 131072  # of each server
MOST_RATIO, MOST_SPREAD, LEAST_SPEEDUP = 5.0, 3.0, 1.3
TIMEOUT_S = 1200.0
QUICK = {"streams": [8], "rounds": 1, "seconds": 20.0}
_MOVED = re.compile(r"; blocks \S+ move to ")  # what the gateway logs of a recovery
_numbers = itertools.count()


@dataclass
class MixedStream:
    """What one stream has seen, in seconds: of requests without a token so far, how long they have waited."""

    key: str
    num_tokens: int = 0
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Mixed:
    """What one run has shown; waits and gaps in seconds, ``spread``: the most tokens of a stream by the fewest.

    ``few_p99_s``: of the first token of the second key's streams; None: there is one key. ``cores``: of each server.
    ``servers_ms`` and ``gateway_ms``: processor time per token of all servers and of the gateway, which depends less on
    what else the machine does. Prompts count in it.
    """

    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    tokens_per_s: float
    spread: float
    recoveries: float
    few_p99_s: float | None
    cores: tuple[float, ...]
    servers_ms: float
    gateway_ms: float

    @classmethod
    def of(cls, streams: Sequence[MixedStream], seconds: float, recoveries: int, cpu_s: Sequence[float]) -> Mixed:
        """Return the summary. ``cpu_s``: the processor time of each server, and of the gateway last."""
        many = [stream for stream in streams if stream.key == KEYS[0]]
        few = [first for stream in streams if stream.key == KEYS[1] for first in stream.firsts_s]
        firsts = [first for stream in many for first in stream.firsts_s]
        gaps = [gap for stream in many for gap in stream.gaps_s] or [seconds]
        counts = [stream.num_tokens for stream in many]
        *servers_s, gateway_s = cpu_s
        num_tokens = sum(stream.num_tokens for stream in streams)
        return cls(
            *numpy.percentile(firsts, [50, 99]).tolist(),
            *numpy.percentile(gaps, [50, 99]).tolist(),
            num_tokens / seconds,
            max(counts) / max(1, min(counts)),
            recoveries,
            float(numpy.percentile(few, 99)) if few else None,
            tuple(round(each / seconds, 2) for each in servers_s),
            sum(servers_s) * 1e3 / num_tokens,
            gateway_s * 1e3 / num_tokens,
        )


def vocabulary_of(path: Path) -> Sequence[str]:
    """Words that are about one token each: the tokenizer of our own random models has words of its own."""
    return [f"w{number}" for number in range(3, 32000)] if path.name in SHAPES else ENGLISH.split()


def requests_of(number: int, vocabulary: Sequence[str], words: Sequence[int] = WORDS) -> Iterator[tuple[str, int]]:
    """Prompts and how many tokens are wanted: every length once before any comes again, whatever the stream."""
    chance = random.Random(number)
    while True:
        lengths, tokens = chance.sample(words, len(words)), chance.sample(NEW_TOKENS, len(NEW_TOKENS))
        for num_words, num_tokens in zip(lengths, itertools.cycle(tokens), strict=False):
            yield " ".join(chance.choices(vocabulary, k=num_words)), num_tokens


async def run_mixed(url: str, path: Path, num_streams: int, num_keys: int, seconds: float) -> list[MixedStream]:
    model, vocabulary = str(path), vocabulary_of(path)
    few = [number for number in range(num_streams) if num_keys > 1 and number % FEW == FEW - 1]
    streams = [MixedStream(KEYS[number in few]) for number in range(num_streams)]
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            key: await stack.enter_async_context(
                AsyncOpenAI(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=0)
            )
            for key in KEYS
        }
        await asyncio.wait_for(
            _ask(clients[KEYS[0]], model, vocabulary[0], 1, MixedStream("")), TIMEOUT_S
        )  # all are connected

        async def run(number: int, stream: MixedStream) -> None:
            for prompt, num_tokens in requests_of(number, vocabulary, WORDS[:1] if number in few else WORDS):
                await _ask(clients[stream.key], model, prompt, num_tokens, stream)

        tasks = [asyncio.create_task(run(number, stream)) for number, stream in enumerate(streams)]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    return streams


async def _ask(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int, stream: MixedStream) -> None:
    last_s, is_first = time.perf_counter(), True
    try:
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True
        )
        async with answer:
            async for chunk in answer:
                if not chunk.choices or not chunk.choices[0].text:
                    continue
                now_s = time.perf_counter()
                (stream.firsts_s if is_first else stream.gaps_s).append(now_s - last_s)
                last_s, is_first = now_s, False
                stream.num_tokens += 1
    except asyncio.CancelledError:
        if is_first:
            stream.firsts_s.append(time.perf_counter() - last_s)
        raise


def measure_mixed(
    path: Path, checkout: Path, args: argparse.Namespace, num_streams: int, http_server: Callable[..., Any]
) -> Mixed:
    """One run with servers and a gateway of their own, of this checkout or of another."""
    num_blocks = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    half = num_blocks // 2
    swarm = f"mixed-{os.getpid()}-{next(_numbers)}"
    of_server = ["--model", str(path), "--quant", "int8", "--cache-tokens", str(CACHE_TOKENS), "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spans = [f"0:{half}", f"0:{half}", f"{half}:{num_blocks}"]
        hosts = None
        if args.server_cores is not None:
            hosts = [(stack.enter_context(cpu_share(args.server_cores)), "127.0.0.1") for _ in spans]
        servers = stack.enter_context(local_servers(swarm, spans, of_server, hosts=hosts, root=checkout))
        command = [sys.executable, "-m", "swarm_client", "serve", "--model", str(path), "--swarm", swarm]
        command += ["--head-quant", args.head_quant, "--max-active", str(num_streams), "--history", "none"]
        if args.workers > 1:  # a checkout beside this one may not know the flag
            command += ["--workers", str(args.workers)]
        if args.keys > 1:
            keys = directory / "keys"
            keys.write_text("\n".join(KEYS))
            command += ["--api-keys", str(keys)]
        log = directory / "log"
        gateway = stack.enter_context(http_server(command, threads=1, root=checkout, log_file=log))
        if args.workers > 1:
            while SERVING_ON not in log.read_text():  # all workers are ready
                time.sleep(0.2)
        of_gateway = [gateway.pid, *(child.pid for child in psutil.Process(gateway.pid).children())]
        pids = [*(server.pid for server in servers), *of_gateway]
        before_s = [cpu_s_of(pid) for pid in pids]
        try:
            streams = asyncio.run(run_mixed(gateway.url, path, num_streams, args.keys, args.seconds))
        except Exception:  # of a client: the reason is in the gateway's log, which goes with its directory
            print(log.read_text(), file=sys.stderr)
            raise
        cpu_s = [cpu_s_of(pid) - before for pid, before in zip(pids, before_s, strict=True)]
        moves = [line for line in log.read_text().splitlines() if _MOVED.search(line)]
    for line in moves:
        print(line, file=sys.stderr)
    by_process = [*cpu_s[: len(servers)], sum(cpu_s[len(servers) :])]
    return Mixed.of(streams, args.seconds, len(moves), by_process)


def measure_mixed_streams(path: Path, args: argparse.Namespace, http_server: Callable[..., Any]) -> Iterator[dict]:
    """The rows; ``args.beside``: another checkout, whose servers and gateway take turns with these."""
    checkouts = {"here": ROOT} | ({} if args.beside is None else {"beside": args.beside.resolve()})
    for num_streams in args.streams:
        rounds: dict[str, list[Mixed]] = {name: [] for name in checkouts}
        for _ in range(args.rounds):
            for name, checkout in checkouts.items():
                rounds[name].append(found := measure_mixed(path, checkout, args, num_streams, http_server))
                print(name, found, flush=True)
        yield from _rows(num_streams, rounds)


def _rows(num_streams: int, rounds: Mapping[str, Sequence[Mixed]]) -> Iterator[dict[str, Any]]:
    def median(name: str, what: Callable[[Mixed], float | None]) -> float | None:
        values = [value for found in rounds.get(name, ()) if (value := what(found)) is not None]
        return float(numpy.median(values)) if values else None

    facts: list[tuple[str, Callable[[Mixed], float | None], float | None]] = [
        ("first token p50, s", lambda found: found.first_p50_s, None),
        ("first token p99, s", lambda found: found.first_p99_s, None),
        ("first token, p99 by p50", lambda found: found.first_p99_s / found.first_p50_s, MOST_RATIO),
        ("gap p50, s", lambda found: found.gap_p50_s, None),
        ("gap p99, s", lambda found: found.gap_p99_s, None),
        ("tokens of a stream, most by fewest", lambda found: found.spread, MOST_SPREAD),
        ("processor time of all servers per token, ms", lambda found: found.servers_ms, None),
        ("processor time of the gateway per token, ms", lambda found: found.gateway_ms, None),
        ("recoveries", lambda found: found.recoveries, 0.0),
        ("first token p99 of a second key's short prompts, s", lambda found: found.few_p99_s, None),
    ]
    for name, what, target in facts:
        if (measured := median("here", what)) is not None:
            beside = median("beside", what)
            yield json_row(f"{num_streams} mixed streams, {name}", measured, target, beside=beside, at_most=True)
    ours, theirs = (median(name, lambda found: found.tokens_per_s) for name in ("here", "beside"))
    assert ours is not None
    name = f"{num_streams} mixed streams, tokens/s"
    if theirs is None:
        yield json_row(name, ours)
    else:
        yield json_row(name, ours, LEAST_SPEEDUP, beside=theirs, ratio=ours / theirs)
