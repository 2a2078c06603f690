"""How fast the engine is: decoding, prefill, memory, start and hops, beside local Hugging Face in the same run.

    python benchmarks/engine.py                              # bench-1b, 2 servers on one core each
    python benchmarks/engine.py --quick                      # bench-tiny in a minute or two, to see that it works
    python benchmarks/engine.py --only decode-8-int8 hop --json engine.json
    python benchmarks/engine.py --device cuda --model bench-8b --servers 1

Contestants take turns (A B A B), because such machines are noisy: compare by the ratio, not across runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    QUANT_NAMES,
    Fleet,
    decode_tokens_per_s,
    first_token_s,
    fleet,
    generate,
    load_local,
    median_ratio,
    random_ids,
    take_turns,
    write_json,
)
from crowd import crowd
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

PROMPT, PREFILL = 16, 512  # tokens
SHORT_CONTEXT, LONG_CONTEXT = 64, 1024
PREFIX, QUESTION, ANSWER = 256, 32, 16
BATCH, BATCH_TOKENS = 128, 16
CACHE_TOKENS = 16384  # of each server: the sessions with long contexts take a bit more than half
QUICK = {"model": "bench-tiny", "rounds": 1, "new_tokens": 8}
HOP_MODEL, HOP_CHAINS, HOP_TOKENS = "bench-tiny", (1, 2, 4), 64
HOP_QUANT = "int8"  # whose decode steps are programs
CROWD_MODEL, CROWD_S = "bench-thin", 10.0  # its blocks cost next to nothing
THREADS_MODEL, THREADS = "bench-mid", 8
PARKED, IDLE_S = 1024, 6.0  # positions of a chat, and how long it must be idle until it may leave the cache


@dataclass(frozen=True)
class Goal:
    """What a row must reach. ``by_ratio``: the ratio is judged, otherwise what was measured."""

    what: str
    unit: str
    target: float
    stretch: float | None = None
    at_most: bool = False
    by_ratio: bool = True

    def reached(self, value: float) -> str:
        def good(bound: float) -> bool:
            return value <= bound if self.at_most else value >= bound

        if not good(self.target):
            return "no"
        return "stretch" if self.stretch is not None and good(self.stretch) else "yes"


GOALS = {
    "decode-1-int8": Goal("decode, 1 session, int8", "tokens/s", 5.2),
    "decode-1-int4": Goal("decode, 1 session, int4", "tokens/s", 7.0),
    "decode-1-fp32": Goal("decode, 1 session, fp32", "tokens/s", 0.97),
    **{
        f"group-decode-{sessions}-{quant}": Goal(
            f"decode, {sessions} session{'s'[: sessions > 1]}, {quant}, a group of two beside a chain of two",
            "tokens/s",
            target,
        )
        for sessions, quant, target in ((1, "int8", 1.6), (1, "int4", 1.3), (8, "int8", 1.0), (16, "int8", 0.9))
    },
    "group-prefill-int8": Goal(f"prefill {PREFILL}, int8, a group of two beside a chain of two", "tokens/s", 0.9),
    "decode-8-int8": Goal("decode, 8 sessions, int8", "tokens/s", 15.0),
    "decode-16-int8": Goal("decode, 16 sessions, int8", "tokens/s", 20.0),
    "batch": Goal(f"decode, one batch of {BATCH}, int8, beside the same in one lane", "tokens/s", 1.4),
    "context": Goal(f"decode, 8 sessions at {LONG_CONTEXT}, beside {SHORT_CONTEXT}", "tokens/s", 0.7, 0.85),
    "prefill-int8": Goal(f"prefill {PREFILL}, int8", "tokens/s", 5.0),
    "prefill-fp32": Goal(f"prefill {PREFILL}, fp32", "tokens/s", 1.7, 2.0),
    "memory": Goal("peak memory of a server, int8", "GB", 0.8, at_most=True, by_ratio=False),
    "start": Goal("start to ready, int8", "s", 4.0, at_most=True, by_ratio=False),
    "threads": Goal(f"{THREADS} generate() threads, {THREADS_MODEL}, beside one", "tokens/s", 3.0),
    "hop": Goal("overhead per hop, hidden 64", "ms/token", 1.0, at_most=True, by_ratio=False),
    # Five times what was measured first
    "crowd-64": Goal("64 sessions, hidden 64", "steps/s", 20_000.0, by_ratio=False),
    "crowd-256": Goal("256 sessions, hidden 64", "steps/s", 18_000.0, by_ratio=False),
    "chat": Goal("first token, second chat turn, beside cold", "s", 0.3, at_most=True),
    "parked": Goal(f"first token, next turn of a parked chat of {PARKED}, beside cold", "s", 0.3, at_most=True),
    "prefix": Goal(f"first token, shared prefix {PREFIX}, beside cold", "s", 0.3, at_most=True),
}


@dataclass(frozen=True)
class Row:
    """One line of the table; ``beside`` is the reference: local Hugging Face, or what the row's name says."""

    name: str
    what: str
    unit: str
    measured: float
    beside: float | None = None
    ratio: float | None = None
    target: float | None = None
    stretch: float | None = None
    met: str = ""
    rounds: dict[str, list[float]] | None = None


def judged(name: str, measured: float, **more: Any) -> Row:
    goal = GOALS[name]
    row = Row(name, goal.what, goal.unit, measured, **more)
    met = goal.reached(row.ratio if goal.by_ratio else measured)
    return replace(row, target=goal.target, stretch=goal.stretch, met=met)


def compared(name: str, rounds: int, reference: Callable, *contestants: tuple[str, Callable]) -> Iterator[Row]:
    """The reference and the contestants in turns; the first contestant is the one that counts."""
    measured = take_turns(rounds, {"beside": reference, **dict(contestants)})
    beside = measured["beside"]
    for number, (note, _) in enumerate(contestants):
        values = measured[note]
        numbers = {
            "measured": statistics.median(values),
            "beside": statistics.median(beside),
            "ratio": median_ratio(values, beside),
            "rounds": {"beside": beside, "measured": values},
        }
        goal = GOALS[name]
        what = f"{goal.what}, {note}" if note else goal.what
        if number:
            yield Row(f"{name} {note}", what, goal.unit, **numbers)
        else:
            yield replace(judged(name, **numbers), what=what)


def decode(model: PreTrainedModel, sessions: int, context: int, new_tokens: int) -> float:
    return decode_tokens_per_s(model, [random_ids(context) for _ in range(sessions)], new_tokens)


def batch(model: PreTrainedModel, unit: int) -> float:
    """``unit``: see ``RemoteSpan.open_session``."""
    rows = torch.cat([random_ids(PROMPT) for _ in range(BATCH)])
    cache = model.new_cache(PROMPT + BATCH_TOKENS + 1, row_unit=unit)
    return BATCH * decode_tokens_per_s(model, [rows], BATCH_TOKENS, past_key_values=cache)


def prefill(model: PreTrainedModel) -> float:
    return PREFILL / first_token_s(model, random_ids(PREFILL))


def cold(model: PreTrainedModel, num_tokens: int) -> float:
    return first_token_s(model, random_ids(num_tokens))


def second_turn(
    model: PreTrainedModel, length: int = PREFIX, meanwhile: Callable[[PreTrainedModel], object] = lambda model: None
) -> float:
    """A prompt of this length and its answer have been there; a question follows."""
    cache = DynamicCache()
    talk = generate(model, random_ids(length), ANSWER, past_key_values=cache)
    meanwhile(model)
    return first_token_s(model, torch.cat([talk, random_ids(QUESTION).to(talk.device)], 1), past_key_values=cache)


def shared_prefix(model: PreTrainedModel) -> float:
    """Another session has had the same beginning."""
    prefix = random_ids(PREFIX)
    generate(model, torch.cat([prefix, random_ids(QUESTION)], 1), ANSWER)
    return first_token_s(model, torch.cat([prefix, random_ids(QUESTION)], 1))


def int8_rows(args: argparse.Namespace, servers: Fleet, local: PreTrainedModel) -> Iterator[Row]:
    """Memory is read before the rows that fill the KV cache, and again at the end."""
    heads = sorted(args.head_quant) if args.device == "cpu" else ["none"]  # int8 first: it is the one that counts
    with ExitStack() as stack:
        models = {f"head {QUANT_NAMES[head]}": stack.enter_context(servers.client(head, args.device)) for head in heads}
        model = next(iter(models.values()))
        for each in models.values():
            decode(each, 2, PROMPT, 4)  # warm-up

        def beside(name: str, reference: Callable, contestant: Callable) -> Iterator[Row]:
            return compared(name, args.rounds, reference, ("", contestant))

        def decode_row(name: str, sessions: int) -> Iterator[Row]:
            numbers = PROMPT, args.new_tokens
            contestants = [(note, partial(decode, each, sessions, *numbers)) for note, each in models.items()]
            return compared(name, args.rounds, partial(decode, local, 1, *numbers), *contestants)

        def context(num_tokens: int) -> Callable[[], float]:
            return partial(decode, model, 8, num_tokens, args.new_tokens)

        cold_turn = partial(cold, model, PREFIX + ANSWER + QUESTION)
        cold_prefix = partial(cold, model, PREFIX + QUESTION)
        rows: dict[str, Callable[[], Iterable[Row]]] = {
            "start": lambda: [judged("start", servers.start_s)],
            "decode-1-int8": lambda: decode_row("decode-1-int8", 1),
            "prefill-int8": lambda: beside("prefill-int8", partial(prefill, local), partial(prefill, model)),
            "memory": lambda: [judged("memory", servers.peak_memory_bytes / 1e9)],
            "chat": lambda: beside("chat", cold_turn, partial(second_turn, model)),
            "prefix": lambda: beside("prefix", cold_prefix, partial(shared_prefix, model)),
            "decode-8-int8": lambda: decode_row("decode-8-int8", 8),
            "decode-16-int8": lambda: decode_row("decode-16-int8", 16),
            "batch": lambda: beside("batch", partial(batch, model, BATCH), partial(batch, model, 1)),
            "context": lambda: beside("context", context(SHORT_CONTEXT), context(LONG_CONTEXT)),
        }
        for name, measure in rows.items():
            if name in args.only:
                yield from measure()
        if "memory" in args.only:
            yield Row("memory at the end", "the same, at the end of this run", "GB", servers.peak_memory_bytes / 1e9)


def int4_rows(args: argparse.Namespace, servers: Fleet, local: PreTrainedModel) -> Iterator[Row]:
    heads = sorted(args.head_quant)  # int8 first, as above
    with ExitStack() as stack:
        models = {f"head {QUANT_NAMES[head]}": stack.enter_context(servers.client(head)) for head in heads}
        for each in models.values():
            decode(each, 2, PROMPT, 4)  # warm-up
        alone, *remote = (partial(decode, each, 1, PROMPT, args.new_tokens) for each in (local, *models.values()))
        yield from compared("decode-1-int4", args.rounds, alone, *zip(models, remote, strict=True))


def fp32_rows(args: argparse.Namespace, servers: Fleet, local: PreTrainedModel) -> Iterator[Row]:
    with servers.client(device=args.device) as model:
        decode(model, 2, PROMPT, 4)  # warm-up
        if "decode-1-fp32" in args.only:
            alone, remote = (partial(decode, each, 1, PROMPT, args.new_tokens) for each in (local, model))
            yield from compared("decode-1-fp32", args.rounds, alone, ("", remote))
        if "prefill-fp32" in args.only:
            yield from compared("prefill-fp32", args.rounds, partial(prefill, local), ("", partial(prefill, model)))


def hop_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The same blocks in chains of several lengths: what a token costs more for each hop, by least squares."""
    path = make_model(HOP_MODEL, args.models)

    cpu_ms: list[float] = []  # of a server in the middle of the longest chain

    def token_ms(model: PreTrainedModel, servers: Fleet | None = None) -> float:
        middle = servers.servers[1:-1] if servers is not None else []
        before_s = sum(server.cpu_s for server in middle)
        result = 1000 / decode(model, 1, PROMPT, HOP_TOKENS)
        if middle:
            cpu_ms.append((sum(server.cpu_s for server in middle) - before_s) * 1e3 / len(middle) / HOP_TOKENS)
        return result

    with ExitStack() as stack:
        local = load_local(path)
        token_ms(local)  # warm-up
        contestants = {"local": partial(token_ms, local)}
        options = "--cache-tokens", str(CACHE_TOKENS), "--device", "cpu"
        for length in HOP_CHAINS:
            servers = stack.enter_context(fleet(path, length, HOP_QUANT, *options))
            model = stack.enter_context(servers.client())
            contestants[f"{length} servers"] = partial(token_ms, model, servers)
            token_ms(model)  # warm-up
        measured = take_turns(2 * args.rounds + 1, contestants)
    chains = [measured[f"{length} servers"] for length in HOP_CHAINS]
    slopes = [slope(HOP_CHAINS, times_ms) for times_ms in zip(*chains, strict=True)]
    yield judged("hop", statistics.median(slopes), rounds={**measured, "slope": slopes})
    yield Row("hop cpu", "processor time of a server in the middle", "ms/token", statistics.median(cpu_ms))
    local_ms = statistics.median(measured["local"])
    for length, times_ms in zip(HOP_CHAINS, chains, strict=True):
        what = f"{HOP_MODEL}: a token through {length} server{'s'[: length > 1]}, beside local"
        yield Row(f"hop chain {length}", what, "ms", statistics.median(times_ms), local_ms)


def thread_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Several ``generate()`` at once in one process beside one of a model that never has company.

    The servers are pinned to a core each, the client to none.
    """
    path = make_model(THREADS_MODEL, args.models)
    options = "--cache-tokens", str(CACHE_TOKENS), "--device", "cpu"
    with fleet(path, 2, "int8", *options) as servers, servers.client("int8") as alone, servers.client("int8") as model:
        one, many = (
            partial(decode, alone, 1, PROMPT, args.new_tokens),
            partial(decode, model, THREADS, PROMPT, args.new_tokens),
        )
        one(), many()  # warm-up
        yield from compared("threads", 2 * args.rounds + 1, one, ("", many))


def crowd_rows(args: argparse.Namespace) -> Iterator[Row]:
    """One server whose blocks cost next to nothing, and client processes whose sessions step as fast as it answers.

    The server and the clients are pinned to no core: where there are few, they compete, and the processor time of the
    server is what counts.
    """
    path = make_model(CROWD_MODEL, args.models)
    for name in ("crowd-64", "crowd-256"):
        if name not in args.only:
            continue
        num_rows = int(name.removeprefix("crowd-"))
        options = "--cache-tokens", str(num_rows * 1024), "--max-sessions", "2048", "--device", "cpu"
        with fleet(path, 1, HOP_QUANT, *options) as servers:
            seen = crowd(servers, num_rows, CROWD_S / 5 if args.quick else CROWD_S)
        yield judged(name, seen.steps_per_s)
        yield Row(f"{name} cpu", f"{num_rows} sessions: processor time of the server", "µs/step", seen.cpu_us_per_step)
        yield Row(f"{name} rows", f"{num_rows} sessions: rows of a batch", "rows", seen.rows_per_batch)


def parked_rows(args: argparse.Namespace) -> Iterator[Row]:
    """A chat in a cache with room for one: it goes to disk while it is idle and another chat comes, and returns."""
    path = make_model(args.model, args.models)
    room = PARKED + 2 * ANSWER + QUESTION + 64

    def other_chat(model: PreTrainedModel) -> None:
        time.sleep(IDLE_S)
        first_token_s(model, random_ids(PARKED))

    options = "--cache-tokens", str(room), "--kv-offload-disk", "8GiB", "--device", args.device
    with fleet(path, args.servers, "int8", *options) as servers, servers.client("int8") as model:
        stayed = partial(second_turn, model, PARKED)
        parked = partial(second_turn, model, PARKED, other_chat)
        generate(model, random_ids(PARKED), 1)  # warm-up
        contestants = ("", parked), ("which stayed", stayed)
        yield from compared("parked", args.rounds, partial(cold, model, PARKED), *contestants)


def group_rows(args: argparse.Namespace) -> Iterator[Row]:
    """A server of two processes, which compute each block together, beside two servers with half of the blocks each.

    The servers of the chain are pinned to a core each; the members of the group have a thread each. So has the client,
    because idle threads of OpenMP spin for milliseconds, on a core that the group needs and the chain does not.
    """
    torch.set_num_threads(1)
    path = make_model(args.model, args.models)
    options = "--cache-tokens", str(CACHE_TOKENS), "--device", "cpu"
    for name in (name for name in args.only if name.startswith("group-")):
        kind, *sessions, quant = name.split("-")[1:]
        with ExitStack() as stack:
            runs = []
            for num_servers, grouped in ((2, []), (1, ["--group-size", "2"])):
                servers = stack.enter_context(fleet(path, num_servers, quant, *options, *grouped))
                model = stack.enter_context(servers.client("int8"))
                decoding = [partial(decode, model, int(num), PROMPT, args.new_tokens) for num in sessions]
                runs.append(partial(prefill, model) if kind == "prefill" else decoding[0])
                runs[-1]()  # warm-up
            chain, group = runs
            yield from compared(name, 2 * args.rounds + 1, chain, ("", group))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression(x, y).slope


def run(args: argparse.Namespace) -> Iterator[Row]:
    path = make_model(args.model, args.models)
    options = "--cache-tokens", str(CACHE_TOKENS), "--device", args.device
    own_models = {
        "hop": hop_rows,
        "threads": thread_rows,
        "crowd": crowd_rows,
        "group": group_rows,
        "parked": parked_rows,
    }
    names = [name for name in args.only if name.split("-")[0] not in own_models]
    quants = {name: {"fp32": "none", "int4": "int4"}.get(name[-4:], "int8") for name in names}
    for quant, rows in (("int8", int8_rows), ("int4", int4_rows), ("none", fp32_rows)):
        if quant in quants.values():
            local = load_local(path, args.device, quant)
            decode(local, 1, PROMPT, 4)  # warm-up; and the checkpoint is in the page cache when the servers start
            with fleet(path, args.servers, quant, *options) as servers:
                yield from rows(args, servers, local)
            del local
    for name, rows in own_models.items():
        if any(wanted.split("-")[0] == name for wanted in args.only):
            yield from rows(args)


def table(rows: Sequence[Row]) -> list[str]:
    """In the order of GOALS."""
    order = {name: number for number, name in enumerate(GOALS)}
    headings = ("", "measured", "beside", "ratio", "target", "stretch", "met?")
    lines = [f"{headings[0]:52} " + " ".join(f"{heading:>8}" for heading in headings[1:])]
    for row in sorted(rows, key=lambda row: order[row.name.split()[0]]):
        goal = GOALS.get(row.name)
        sign = "" if goal is None else "≤ " if goal.at_most else "≥ "
        times = "×" if goal is not None and goal.by_ratio else ""
        cells = [
            number(row.measured),
            number(row.beside),
            number(row.ratio),
            row.target and f"{sign}{row.target:g}{times}",
            row.stretch and f"{sign}{row.stretch:g}{times}",
            row.met,
        ]
        lines.append(f"{f'{row.what}, {row.unit}':52} " + " ".join(f"{cell or '':>8}" for cell in cells))
    return lines


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-1b", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--only", nargs="+", default=list(GOALS), choices=GOALS, metavar="NAME", help=", ".join(GOALS))
    parser.add_argument("--head-quant", nargs="+", default=["int8", "none"], choices=QUANT_NAMES)
    parser.add_argument("--device", default="cpu", help="of servers and local model; cuda: bfloat16")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="bench-tiny, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no CUDA device")
    if args.quick:
        vars(args).update(QUICK)
    rows = []
    for row in run(args):
        if args.device != "cpu":  # the goals are for CPUs
            row = replace(row, what=row.what.replace("fp32", "bf16"), target=None, stretch=None, met="")
        rows.append(row)
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f} ×)"
        print(f"{row.what}: {number(row.measured)} {row.unit}{ratio}", flush=True)
    print("", *table(rows), sep="\n")
    if args.json:
        write_json(args.json, vars(args), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
