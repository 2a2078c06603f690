"""The chain a client takes: is there a faster one, and how long does it take to find?

    python benchmarks/routing.py [--cases 1000] [--json FILE]

Small random swarms are compared with every possible chain; large ones are timed, leaving out unusable servers included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

from common import write_json
from rich.console import Console
from rich.table import Table

from swarm_client.routing import ASSUMED_RTT_S, NO_ROOM_S, Chain, Hop, fastest_chain, usable
from swarm_protocol.errors import NoRoute
from swarm_protocol.records import ServerRecord, SwarmView
from swarm_protocol.span import Span

NUM_BLOCKS, NEED_TOKENS = 80, 1000
SIZES = {10: None, 100: None, 1000: 20.0, 10_000: 200.0}  # servers: the most milliseconds that are wanted
REVISION = "r"


def random_server(chance: random.Random, number: int, num_blocks: int, longest: int) -> ServerRecord:
    start = chance.randrange(num_blocks)
    return ServerRecord(
        f"peer{number}",
        ("192.0.2.1:1",),
        "model",
        REVISION,
        num_blocks,
        Span(start, min(num_blocks, start + chance.randint(1, longest))),
        tokens_per_s=chance.lognormvariate(3, 1),
        queue_delay_s=chance.choice([0.0, chance.expovariate(20)]),
        cache_tokens_left=chance.choice([0, 10 * NEED_TOKENS, 10 * NEED_TOKENS]),
    )


def random_swarm(chance: random.Random, num_servers: int, num_blocks: int) -> SwarmView:
    return SwarmView.of(random_server(chance, number, num_blocks, num_blocks) for number in range(num_servers))


def round_trips(chance: random.Random, view: SwarmView) -> dict[str, float]:
    return {server.peer_id: chance.uniform(0.001, 0.3) for server in view.servers if chance.random() < 0.8}


def seconds_per_token(chain: Chain, rtts_s: Mapping[str, float]) -> float:
    """By the definition in ``swarm_client/routing.py``, not by its code."""
    total = 0.0
    for hop in chain:
        server = hop.server
        total += rtts_s.get(server.peer_id, ASSUMED_RTT_S) + server.queue_delay_s
        total += len(hop.span) / (len(server.span) * server.tokens_per_s)
        total += NO_ROOM_S * (server.cache_tokens_left < NEED_TOKENS)
    return total


def every_chain(servers: Sequence[ServerRecord], blocks: Span) -> Iterator[Chain]:
    for server in servers:
        if blocks.start in server.span:
            for end in range(blocks.start + 1, min(server.span.end, blocks.end) + 1):
                hop = Hop(server, Span(blocks.start, end))
                if end == blocks.end:
                    yield (hop,)
                else:
                    yield from ((hop, *rest) for rest in every_chain(servers, Span(end, blocks.end)))


def excess(seed: int) -> float | None:
    """How much slower than the best chain ours is, relative; None if there is no chain, which ours must say too."""
    chance = random.Random(seed)
    view = random_swarm(chance, chance.randint(2, 6), 6)
    rtts_s, blocks = round_trips(chance, view), Span(0, 6)
    best = min((seconds_per_token(chain, rtts_s) for chain in every_chain(view.servers, blocks)), default=None)
    try:
        found = fastest_chain(view, blocks, rtts_s=rtts_s, need_tokens=NEED_TOKENS)
    except NoRoute:
        assert best is None, f"swarm {seed} has a chain"
        return None
    return seconds_per_token(found, rtts_s) / best - 1


def route_ms(num_servers: int, repeats: int = 20) -> list[float]:
    chance = random.Random(num_servers)
    whole = replace(random_server(chance, 0, NUM_BLOCKS, NUM_BLOCKS), peer_id="whole", span=Span(0, NUM_BLOCKS))
    view = SwarmView.of((whole, *random_swarm(chance, num_servers - 1, NUM_BLOCKS).servers))
    rtts_s, banned = round_trips(chance, view), {"peer0"}
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        servers, _ = usable(view, REVISION, NUM_BLOCKS, banned)
        fastest_chain(servers, Span(0, NUM_BLOCKS), rtts_s=rtts_s, need_tokens=NEED_TOKENS)
        times.append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="small swarms compared with every chain")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    console = Console(highlight=False)
    found = list(islice((value for seed in count() if (value := excess(seed)) is not None), args.cases))
    console.print(
        f"{args.cases} swarms of 2 to 6 servers and 6 blocks: the chain is at most {max(found):.2%} slower than the "
        "best of all (target 1 %)"
    )
    table = Table("servers", "ms per route", "slowest", "target", title=f"{NUM_BLOCKS} blocks", box=None)
    results = {}
    for num_servers, target_ms in SIZES.items():
        times = route_ms(num_servers)
        results[num_servers] = {"median_ms": statistics.median(times), "max_ms": max(times), "target_ms": target_ms}
        target = "" if target_ms is None else f"≤ {target_ms:g}"
        table.add_row(str(num_servers), f"{statistics.median(times):.2f}", f"{max(times):.2f}", target)
    console.print(table)
    if args.json:
        write_json(args.json, vars(args), worst_excess=max(found), times=results)


if __name__ == "__main__":
    main()
