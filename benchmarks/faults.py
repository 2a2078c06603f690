"""What the fault benchmarks share: servers to end, generations to watch, and whether their tokens are right."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from common import even_spans
from make_model import SHAPES, make_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client import DistributedModel
from swarm_client.core.events import Event, SessionStats
from swarm_client.sessions.session import RemoteSession
from swarm_models.checkpoints.default_model import locate
from swarm_models.checkpoints.describing import describe
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import Closing
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput

NUM_SPANS, NUM_REPLICAS = 3, 2
NEAR_TIE = {"none": 1e-4, "int8": 1e-2}  # logits that far apart: rounding decides
PREFILL_LENGTHS = (1, 16, 64, 128, 256)
PREFILL_REPEATS = 3
_END_TIMEOUT_S = 15.0
_FIND_TIMEOUT_S = 5.0
_POLL_S = 0.002
_numbers = itertools.count()

console = Console(highlight=False)

OnToken = Callable[[RemoteSession, int], None]  # with the number of new tokens, from 0: before the generation


def model_path(name: str, directory: Path) -> Path:
    return make_model(name, directory) if name in SHAPES else Path(locate(name))


class Replicas(Closing):
    """Server processes of one private swarm: several for every span, and another for each that is ended."""

    def __init__(
        self, cluster: LocalCluster, path: Path, quant: str, *options: str, num_replicas: int = NUM_REPLICAS
    ) -> None:
        self.path, self.quant = path, quant
        self.swarm = f"chaos-{os.getpid()}-{next(_numbers)}"
        num_blocks = describe(AutoConfig.from_pretrained(path)).num_blocks
        self.spans = [Span.parse(span) for span in even_spans(num_blocks, NUM_SPANS)]
        self.servers: list[LocalServer] = []
        self._cluster = cluster
        self._span_of: dict[int, Span] = {}  # by process id
        self._options = ["--log-level", "warning", "--throughput", "100", "--cache-tokens", "16384", *options]
        for _ in range(num_replicas):  # not all at once: a libp2p daemon must be there within 6 s
            for span in self.spans:
                self.start(span)
            self.wait_ready()

    def start(self, span: Span) -> LocalServer:
        """Returns at once."""
        where = ["--model", str(self.path), "--quant", self.quant, "--swarm", self.swarm, "--blocks", str(span)]
        server = self._cluster.start(*where, *self._options)
        self._span_of[server.pid] = span
        self.servers.append(server)
        return server

    def wait_ready(self) -> None:
        self._cluster.wait_ready(self.servers)

    def find(self, peer_id: str) -> LocalServer:
        """A server can be in use a moment before it has said that it is ready."""
        deadline = time.monotonic() + _FIND_TIMEOUT_S
        while time.monotonic() < deadline:
            for server in self.servers:
                if server.ready and server.peer_id == peer_id:
                    return server
            time.sleep(0.01)
        raise AssertionError(f"no server of this benchmark is {peer_id}")

    def replace(self, server: LocalServer) -> None:
        """Starts another instead of a server that has been ended; returns at once."""
        self.servers.remove(server)
        self.start(self._span_of[server.pid])

    def close(self) -> None:
        for server in self.servers:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGTERM)
        for server in self.servers:
            if not server.wait_gone(_END_TIMEOUT_S):
                server.kill()

    def client(self, **options: Any) -> PreTrainedModel:
        """A distributed model, which is a context manager."""
        return DistributedModel.from_pretrained(str(self.path), swarm=self.swarm, **options)


def random_prompts(path: Path, lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Each [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = AutoConfig.from_pretrained(path).vocab_size
    return [torch.randint(3, vocabulary, (1, length), generator=generator) for length in lengths]


@dataclass
class Generation:
    """One generation and what happened to it. ``times``: when each token came, and when the next could begin."""

    tokens: list[int] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stats: SessionStats = field(default_factory=SessionStats)
    seconds: float = 0.0
    error: str = ""

    @property
    def gaps_s(self) -> list[float]:
        """Before each token but the first."""
        return [came - before for (_, before), (came, _) in itertools.pairwise(self.times)]

    @property
    def hiccup_s(self) -> float:
        """What a user sees: by how much the longest gap exceeds the median."""
        return max(self.gaps_s) - statistics.median(self.gaps_s)


class _Observer(BaseStreamer):
    def __init__(self, generation: Generation, session: RemoteSession, on_token: OnToken | None) -> None:
        self._generation, self._session, self._on_token = generation, session, on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        came = time.perf_counter()
        self._generation.tokens += value.tolist()
        if self._on_token is not None:
            self._on_token(self._session, len(self._generation.tokens))
        self._generation.times.append((came, time.perf_counter()))

    def end(self) -> None:
        pass


@contextmanager
def generation(
    model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, on_token: OnToken | None = None
) -> Iterator[Generation]:
    """A greedy one, which has ended, for better or worse; its session is closed afterwards."""
    result = Generation()
    cache = model.new_cache(prompt.shape[1] + new_tokens, on_event=result.events.append)
    result.stats = cache.session.stats
    start = time.perf_counter()
    if on_token is not None:
        on_token(cache.session, 0)
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=_Observer(result, cache.session, on_token),
        )
    except SwarmError as error:
        result.error = f"{type(error).__name__}: {error}"
    result.seconds = time.perf_counter() - start
    try:
        yield result
    finally:
        cache.session.close()


def undisturbed(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """The right tokens."""
    with generation(model, prompt, new_tokens) as result:
        if result.error or result.events:
            raise SystemExit(f"a generation that nothing should disturb failed: {result.error or result.events}")
        return result.tokens


class PrefillTimes:
    """How long a span computes a prompt when nothing fails: measured at a few lengths, a straight line between."""

    def __init__(self, model: PreTrainedModel, spans: Sequence[Span]) -> None:
        self._seconds: dict[Span, list[float]] = {}
        for span in spans:
            measured = [
                statistics.median(_prefill_s(model, span, length) for _ in range(PREFILL_REPEATS))
                for length in PREFILL_LENGTHS
            ]
            self._seconds[span] = measured

    def seconds(self, span: Span, num_tokens: int) -> float:
        """Of all our spans within ``span``, one after the other."""
        within = [times for ours, times in self._seconds.items() if span.covers(ours)]
        return sum(float(numpy.interp(num_tokens, PREFILL_LENGTHS, times)) for times in within)


def _prefill_s(model: PreTrainedModel, span: Span, num_tokens: int) -> float:
    """Through a session that is open, with one position in it."""
    session = model.blocks[span.start : span.end].open_session(num_tokens + 1, standby=False)
    hidden = torch.randn(1, num_tokens + 1, model.config.hidden_size)
    session.step(BlockInput(hidden[:, :1]), 1)
    start = time.perf_counter()
    session.step(BlockInput(hidden[:, 1:]), 1)
    seconds = time.perf_counter() - start
    session.close()
    return seconds


@dataclass
class Tally:
    """Whether generations finished, and with the right tokens."""

    num_runs: int = 0
    num_finished: int = 0
    num_tokens: int = 0  # compared
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)  # different, but rounding decided

    @property
    def good(self) -> bool:
        return not (self.errors or self.different)

    def add(
        self, model: PreTrainedModel, quant: str, prompt: torch.Tensor, result: Generation, right: list[int]
    ) -> None:
        self.num_runs += 1
        self.num_tokens += len(result.tokens)
        if result.error or len(result.tokens) != len(right):
            self.errors.append(result.error or f"{len(result.tokens)} tokens instead of {len(right)}")
            return
        self.num_finished += 1
        pairs = zip(result.tokens, right, strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is None:
            return
        margin = _margin(model, prompt, right[:first], right[first], result.tokens[first])
        words = (
            f"token {first + 1} is {result.tokens[first]} instead of {right[first]}, {margin:.1g} likelier in logits"
        )
        (self.near_ties if margin <= NEAR_TIE[quant] else self.different).append(words)

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def __str__(self) -> str:
        problems = [f"[red]{escape(words)}[/]" for words in (*self.errors, *self.different)]
        ties = [f"{len(self.near_ties)} near ties: {'; '.join(self.near_ties)}"] if self.near_ties else []
        counts = f"{self.num_finished} of {self.num_runs} generations finished; "
        counts += f"{self.num_tokens} tokens compared, {len(self.different)} generations differ"
        return "\n".join([counts, *ties, *problems])


@torch.inference_mode()
def _margin(model: PreTrainedModel, prompt: torch.Tensor, before: list[int], right: int, token: int) -> float:
    """By how much the right token is likelier, computed without a cache."""
    ids = torch.cat([prompt, torch.tensor([before], dtype=torch.long)], dim=1)
    logits = model(ids, use_cache=False).logits[0, -1]
    return abs(float(logits[right] - logits[token]))


def results_table(title: str, *headings: str) -> Table:
    """Times are p50, p99 and maximum, in seconds; a gap is the longest between two tokens minus the median."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    return table


def spread(values: Sequence[float | None]) -> str:
    """The median, the 99th percentile and the largest; infinity where something never happened."""
    if not values:
        return "–"
    numbers = [float("inf") if value is None else value for value in values]
    return "/".join(f"{numpy.percentile(numbers, part, method='inverted_cdf'):.2f}" for part in (50, 99, 100))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until it holds; None if it does not."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() > start + timeout_s:
            return None
        time.sleep(_POLL_S)
    return time.monotonic() - start
