"""A server under attack in a process of its own, and an honest client whose tokens must stay right meanwhile."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MIB, WIRE_VERSION
from tests.swarm.pair import ends_only_at_its_length, random_ids
from tests.swarm.processes import ServerProcess
from tests.swarm.raw_client import RawClient
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

INCOMING_BYTES = 16 * MIB
STALL_TIMEOUT_S = 2.0
MAX_SESSIONS = 32
ADAPTER_BYTES = 1 * MIB
_MIN_BYTES_PER_S = 1.0 * MIB
_SLACK_BYTES = 160 * MIB  # of the server's memory: its C library keeps up to 64 MiB for a thread that freed them
_PROMPT = random_ids(1, 9, seed=7)
_NEW_TOKENS = 6
CACHE_TOKENS = 2048


class Attacked:
    """The server, an honest client of it, and an attacker's.

    Attributes:
        attacker: sends what it likes.
        others: clients with keys of their own, to attack with or to see who else gets in.
    """

    def __init__(
        self, server: ServerProcess, remote: PreTrainedModel, expected: torch.Tensor, logits: torch.Tensor
    ) -> None:
        self.server = server
        self._remote, self._expected, self._logits = remote, expected, logits
        self._num_rounds = 0
        self.record: ServerRecord = background.run(remote.blocks.swarm.view(0.0)).servers[0]
        self.attacker = RawClient(self.record)

    @cached_property
    def others(self) -> list[RawClient]:
        return [RawClient(self.record, ClientCredentials(Identity.generate())) for _ in range(3)]

    def honest_client_goes_on(self, rounds: int = 2) -> None:
        """Returns when it has done so much from now on: in the last round, all was asked for after the call."""
        before = self._num_rounds
        wait_for(lambda: self._num_rounds >= before + rounds or self._has_ended, "the honest client is served")
        assert self._num_rounds >= before + rounds

    @contextmanager
    def while_an_honest_client_generates(self) -> Iterator[None]:
        """Its tokens are right. Afterwards the server has its memory and its room back, and no error in its log."""
        self._generate()
        memory_bytes = self.memory_bytes
        over = threading.Event()
        rounds: list[bool] = []
        self._has_ended = False

        def generate() -> None:
            try:
                while not (rounds and over.is_set()):
                    rounds.append(self._generate())
                    self._num_rounds += 1
            finally:
                self._has_ended = True

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert rounds and all(rounds)
        describe = self.attacker.describe
        wait_for(lambda: describe().cache_tokens_left == CACHE_TOKENS, "the room of sessions has come back")
        wait_for(lambda: self.memory_bytes < memory_bytes + _SLACK_BYTES, "the server's memory has come back")
        assert "Traceback" not in self.server.stderr

    @property
    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[1]) * 4096

    def contract(self, **fields: object) -> pb.Contract:
        record = self.attacker.record
        blocks = pb.Span(start=record.span.start, end=record.span.end)
        known = dict(wire_version=WIRE_VERSION, model=record.model, revision=record.revision, blocks=blocks)
        return pb.Contract(**(known | fields))

    def opening(self, key: bytes | None = None, **fields: object) -> pb.SessionRequest:
        known = dict(contract=self.contract(), session_key=key or secrets.token_bytes(16), batch_size=1)
        return pb.SessionRequest(open=pb.Open(**(known | fields)))

    def _generate(self) -> bool:
        options = dict(attention_mask=torch.ones_like(_PROMPT), max_new_tokens=_NEW_TOKENS, do_sample=False)
        tokens = self._remote.generate(_PROMPT, **options)
        logits = self._remote(_PROMPT, use_cache=False).logits  # a pass without a session
        return torch.equal(tokens, self._expected) and torch.allclose(logits, self._logits, atol=1e-4)


@contextmanager
def attacked(directory: Path) -> Iterator[Attacked]:
    model = directory / "llama"
    save_checkpoint("llama", model)
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    options = dict(attention_mask=torch.ones_like(_PROMPT), max_new_tokens=_NEW_TOKENS, do_sample=False)
    expected, logits = whole.generate(_PROMPT, **options), whole(_PROMPT).logits
    fields = {
        "model": str(model),
        "blocks": f"0:{whole.config.num_hidden_layers}",
        "quant": "none",
        "throughput": 100.0,
        "cache_tokens": CACHE_TOKENS,
        "incoming_bytes": INCOMING_BYTES,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "max_sessions": MAX_SESSIONS,
        "adapter_bytes": ADAPTER_BYTES,
        "min_bytes_per_s": _MIN_BYTES_PER_S,
    }
    with (
        ServerProcess(json.dumps(fields), cache=directory, module="tests.attack.attacked_server") as server,
        DistributedModel.from_pretrained(str(model), initial_peers=[server.ready["peer"]]) as remote,
    ):
        target = Attacked(server, ends_only_at_its_length(remote), expected, logits)
        try:
            yield target
        finally:
            for client in (target.attacker, *target.others):
                client.close()
            server.kill()  # nobody is left who would have to be let go
