"""The load test's clients: what they ask for, honest ones, and those that vanish."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from swarm_client import DistributedModel

MAX_PROMPT, MAX_NEW, MAX_ROWS = 300, 48, 4
VOCABULARY = (3, 32000)
CANCELLED_PART = 0.1  # of the requests that can be cancelled
KINDS = {"single": 6, "shared": 2, "batch": 1, "beams": 1}  # how often
_SYSTEM_PROMPT = torch.randint(*VOCABULARY, (200,), generator=torch.Generator().manual_seed(0))
_SYSTEM_PROMPT_PARTS = (40, 100, 200)
_AFTER_ERROR_S = 0.5
_START_TIMEOUT_S = 120.0  # of a process that will vanish; the machine is busy
_LIFE_S = (0.5, 8.0)  # from its first answer until it is killed


@dataclass(frozen=True)
class Request:
    """Arguments of ``generate``; greedy or beam search, so that the answer is known."""

    kind: str
    input_ids: torch.Tensor  # [batch, tokens]
    attention_mask: torch.Tensor  # padding is on the left
    new_tokens: int
    num_beams: int = 1

    @classmethod
    def any(cls, chance: random.Random) -> Request:
        """Mixed lengths; some begin alike, some are batches of unequal lengths or beam searches."""
        (kind,) = chance.choices(list(KINDS), KINDS.values())
        ids = random_rows(chance, chance.randint(2, MAX_ROWS) if kind == "batch" else 1, chance.randint(1, MAX_PROMPT))
        mask = torch.ones_like(ids)
        if kind == "shared":
            length = min(chance.choice(_SYSTEM_PROMPT_PARTS), ids.shape[1])
            ids[0, :length] = _SYSTEM_PROMPT[:length]
        for row in range(1, len(ids)):
            mask[row, : chance.randrange(ids.shape[1])] = 0
        beams = chance.randint(2, MAX_ROWS) if kind == "beams" else 1
        return cls(kind, ids, mask, chance.randint(2, MAX_NEW), beams)

    def generate(self, model: PreTrainedModel, **options: Any) -> torch.Tensor:
        """The new tokens, [batch, new_tokens]."""
        output = model.generate(
            self.input_ids,
            attention_mask=self.attention_mask,
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            num_beams=self.num_beams,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return output[:, self.input_ids.shape[1] :]


def random_rows(chance: random.Random, rows: int, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(62))
    return torch.randint(*VOCABULARY, (rows, num_tokens), generator=generator)


class Cancelled(Exception):
    """The client has changed its mind."""


class _Canceller(BaseStreamer):
    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens + 1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Cancelled

    def end(self) -> None:
        pass


@dataclass
class Sessions:
    """Threads that ask one model for one thing after another until they are told to stop."""

    model: PreTrainedModel
    seed: int
    finished: list[tuple[Request, torch.Tensor]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, num_threads: int) -> None:
        for number in range(num_threads):
            thread = threading.Thread(target=self._ask, args=(random.Random(f"{self.seed} {number}"),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Waits for what has begun; a session that hangs is an error."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            self.errors.append(f"{hanging} sessions did not end within {timeout_s:g} s")

    def _ask(self, chance: random.Random) -> None:
        while not self._stopping.is_set():
            request = Request.any(chance)
            try:
                if request.num_beams == 1 and chance.random() < CANCELLED_PART:
                    self._cancel(request, chance.randint(1, request.new_tokens - 1))
                else:
                    self.finished.append((request, request.generate(self.model)))
            except Exception as error:
                self.errors.append(f"{request.kind}: {type(error).__name__}: {error}")
                self._stopping.wait(_AFTER_ERROR_S)

    def _cancel(self, request: Request, after_tokens: int) -> None:
        try:
            request.generate(self.model, streamer=_Canceller(after_tokens))
        except Cancelled:
            self.num_cancelled += 1


@dataclass
class VanishingClients:
    """Client processes that are killed in mid-generation, each followed by a new one, until they are told to stop."""

    model: str
    swarm: str
    threads_each: int
    num_killed: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._context = multiprocessing.get_context("forkserver")  # imports once, before any thread or connection
        self._context.set_forkserver_preload(["swarm_client.model.model", "hivemind.dht.node"])

    def start(self, num_processes: int) -> None:
        for number in range(num_processes):
            thread = threading.Thread(target=self._keep_one, args=(random.Random(f"vanishing {number}"),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _keep_one(self, chance: random.Random) -> None:
        while not self._stopping.is_set():
            here, there = self._context.Pipe()
            arguments = self.model, self.swarm, chance.getrandbits(32), self.threads_each, there
            process = self._context.Process(target=_generate_until_killed, args=arguments, daemon=True)
            process.start()
            there.close()
            try:
                self._wait_for_answer(here)
                self._stopping.wait(chance.uniform(*_LIFE_S))
                self.num_killed += 1
            except (EOFError, TimeoutError) as error:
                self.errors.append(f"a client that was to vanish did not get that far: {error!r}")
                self._stopping.wait(_AFTER_ERROR_S)
            finally:
                process.kill()
                process.join()
                here.close()

    def _wait_for_answer(self, connection: Connection) -> None:
        if not connection.poll(_START_TIMEOUT_S):
            raise TimeoutError(f"no answer within {_START_TIMEOUT_S:g} s")
        connection.recv()


def _generate_until_killed(model: str, swarm: str, seed: int, num_threads: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    sessions = Sessions(DistributedModel.from_pretrained(model, swarm=swarm), seed)
    sessions.start(num_threads)
    wait_until(lambda: bool(sessions.finished), _START_TIMEOUT_S)
    connection.send("answered")
    threading.Event().wait()


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
