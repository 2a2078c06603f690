"""A gateway over HTTP whose generations are written by a script."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import openai
import pytest
import torch
import uvicorn
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from swarm_client.batching.request import Request, Scored, Servers, Token, TokenListener
from swarm_client.batching.sampler import Choice, choose
from swarm_client.core.events import Event
from swarm_gateway.answers.capabilities import capabilities_of
from swarm_gateway.app.app import create_app
from swarm_gateway.app.serving import listen
from swarm_gateway.batch_api.store import BatchStore
from swarm_gateway.limits.admission import DEFAULT_LIMITS, GatewayLimits
from swarm_gateway.web.models import ServedModel, Traits, not_found
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.telemetry.exporting import Telemetry
from tests.unit.gateway.app.tool_families import tokenizer_of

WAIT_S = 30.0  # at most, for what comes at once
CERTIFICATES = ssl.create_default_context()  # to read them takes longer than most of the tests


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass
class Generation:
    """Attributes:
    cancelled: it was, also if it had ended.
    """

    request: Request
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedBatcher:
    """Every generation says the same, each on a thread of its own, up to its ``max_new_tokens``.

    Attributes:
        says: token ids.
        ends: with what they end; None: with nothing, until it is cancelled.
        refuses: what ``submit`` raises.
        happens: to the servers, before each token; told if the request asks for it.
    """

    says: list[int] = field(default_factory=list)
    ends: str | BaseException | None = "stop"
    refuses: Exception | None = None
    happens: dict[int, Servers | Event] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    submitted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def submit(self, request: Request, listener: TokenListener) -> Generation:
        if self.refuses is not None:
            raise self.refuses
        generation = Generation(request)
        self.generations.append(generation)
        threading.Thread(target=self._generate, args=(generation, listener)).start()
        self.submitted.release()
        return generation

    def _generate(self, generation: Generation, listener: TokenListener) -> None:
        request = generation.request
        most = request.config.max_new_tokens
        if request.scores_prompt:
            first, *others = request.prompt
            listener(Scored((Token(first), *(said(token, request.num_logprobs) for token in others))))
        for number, token in enumerate(self.says[:most]):
            if request.with_servers and number in self.happens:
                listener(self.happens[number])
            listener(said(token, request.num_logprobs))
        if len(self.says) >= most:
            listener("length")
        elif self.ends is not None:
            listener(self.ends)


@dataclass
class RandomBatcher:
    """Samples from random logits, as the loop samples from a model's; each generation on a thread of its own."""

    vocab_size: int
    ends: tuple[int, ...] = (1,)

    def submit(self, request: Request, listener: TokenListener) -> Generation:
        generation = Generation(request)
        threading.Thread(target=self._generate, args=(generation, listener)).start()
        return generation

    def _generate(self, generation: Generation, listener: TokenListener) -> None:
        request, random = generation.request, torch.Generator().manual_seed(generation.request.seed or 0)
        processors = LogitsProcessorList(request.processors)
        choice = Choice(list(request.prompt), processors, random, request.num_logprobs)
        for _ in range(request.config.max_new_tokens):
            if generation.cancelled.is_set():
                return
            (token,) = choose([choice], 3 * torch.randn(1, self.vocab_size, generator=random))
            if isinstance(token, Exception):
                return listener(token)
            choice.token_ids.append(token.id)
            listener(token)
            if token.id in self.ends:
                return listener("stop")
        listener("length")


def said(token: int, num_logprobs: int | None) -> Token:
    """Of likelihoods that are easy to tell: half, a quarter, …"""
    if num_logprobs is None:
        return Token(token)
    top = tuple((token + rank, -math.log(2) * (rank + 1)) for rank in range(num_logprobs))
    return Token(token, -math.log(2), top)


async def embed(token_ids: Sequence[int]) -> list[float]:
    """Stands for a model: the mean and the number of its tokens."""
    await asyncio.sleep(0)
    return [sum(token_ids) / len(token_ids), float(len(token_ids)), 1 / 3]


@dataclass
class OneModel:
    model: ServedModel

    async def names(self) -> list[str]:
        return [self.model.name]

    async def traits(self, name: str, *, wait: bool = True) -> Traits:
        capabilities = tuple(capabilities_of(self.model.tokenizer, sees=False))
        return Traits(bool(self.model.tokenizer.chat_template), capabilities, self.model.max_positions)

    async def get(self, name: str) -> ServedModel:
        if name != self.model.name:
            raise not_found(name)
        return self.model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))


@dataclass
class Running:
    """A gateway's server, its thread and its socket."""

    server: uvicorn.Server
    thread: threading.Thread
    listener: socket.socket


@dataclass
class Gateway:
    url: str
    batcher: ScriptedBatcher
    tokenizer: PreTrainedTokenizerBase
    running: Running

    def stop(self) -> None:
        """End the gateway, and wait until it has ended."""
        self.running.server.should_exit = True
        self.running.thread.join(WAIT_S)

    def says(self, text: str, ends: str | BaseException | None = "stop") -> None:
        """What every generation says from now on."""
        self.batcher.says, self.batcher.ends = encode(self.tokenizer, text), ends

    @property
    def prompt(self) -> str:
        """What the model has read last."""
        return str(self.tokenizer.decode(self.batcher.generations[-1].request.prompt))

    def client(self, key: str = "none", **options: Any) -> Any:
        http = openai.DefaultHttpxClient(verify=CERTIFICATES)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S, http_client=http, **options
        )

    def wait_for_generations(self, count: int) -> list[Generation]:
        """The first of them, once there are so many."""
        for _ in range(count):
            assert self.batcher.submitted.acquire(timeout=WAIT_S)
        return self.batcher.generations[:count]


Serve = Callable[..., Gateway]


@pytest.fixture(scope="session")
def ending() -> Iterator[list[Running]]:
    """Servers that have been told to end. Each takes some tenths of a second, for which no test waits."""
    ending: list[Running] = []
    yield ending
    for running in ending:
        running.thread.join(WAIT_S)
        running.listener.close()
        assert not running.thread.is_alive(), running.thread.name


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerBase, ending: list[Running], request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Starts a gateway: ``serve(limits, keys, max_positions=…)``."""
    started: list[Running] = []

    def start(
        limits: GatewayLimits = DEFAULT_LIMITS,
        keys: Sequence[str] = (),
        batches: BatchStore | None = None,
        telemetry: Telemetry | None = None,
        **fields: Any,
    ) -> Gateway:
        batcher = ScriptedBatcher()
        config = GenerationConfig(eos_token_id=1)
        model = ServedModel(DEFAULT_MODEL, tokenizer, batcher, 1024, config, len(tokenizer), embed)
        model = replace(model, **fields)
        app = create_app(OneModel(model), limits, keys, batches=batches, telemetry=telemetry)
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, args=([listener],), name=request.node.nodeid)
        thread.start()
        started.append(Running(server, thread, listener))
        return Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", batcher, model.tokenizer, started[-1])

    yield start
    for running in started:
        running.server.should_exit = True
    ending.extend(started)


@pytest.fixture
def gateway(serve: Serve) -> Gateway:
    return serve()


@pytest.fixture
def caller(serve: Serve, tokenizer: Any) -> Gateway:
    """A gateway whose model has a chat template that knows tools."""
    own = tokenizer_of("qwen", tokenizer)
    return serve(tokenizer=own, vocab_size=len(own))
