"""A server under attack in a process of its own, and an honest client whose tokens must stay right meanwhile."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MIB, WIRE_VERSION
from tests.swarm.pair import ends_only_at_its_length, random_ids
from tests.swarm.processes import ServerProcess
from tests.swarm.raw_client import RawClient
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

INCOMING_BYTES = 16 * MIB
STALL_TIMEOUT_S = 2.0
_MIN_BYTES_PER_S = 1.0 * MIB
_SLACK_BYTES = 160 * MIB  # of the server's memory: its C library keeps up to 64 MiB for a thread that freed them
_PROMPT = random_ids(1, 9, seed=7)
_NEW_TOKENS = 6
_CACHE_TOKENS = 2048


class Attacked:
    """The server, an honest client of it, and an attacker's.

    Attributes:
        attacker: sends what it likes.
    """

    def __init__(self, server: ServerProcess, remote: PreTrainedModel, expected: torch.Tensor) -> None:
        self.server = server
        self._remote, self._expected = remote, expected
        (record,) = background.run(remote.blocks.swarm.view(0.0)).servers
        self.attacker = RawClient(record)

    @contextmanager
    def while_an_honest_client_generates(self) -> Iterator[None]:
        """Its tokens are right. Afterwards the server has its memory and its room back, and no error in its log."""
        self._generate()
        memory_bytes = self.memory_bytes
        over = threading.Event()
        rounds: list[bool] = []

        def generate() -> None:
            while not (rounds and over.is_set()):
                rounds.append(self._generate())

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert rounds and all(rounds)
        describe = self.attacker.describe
        wait_for(lambda: describe().cache_tokens_left == _CACHE_TOKENS, "the room of sessions has come back")
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
        return torch.equal(self._remote.generate(_PROMPT, **options), self._expected)


@contextmanager
def attacked(directory: Path) -> Iterator[Attacked]:
    model = directory / "llama"
    save_checkpoint("llama", model)
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    options = dict(attention_mask=torch.ones_like(_PROMPT), max_new_tokens=_NEW_TOKENS, do_sample=False)
    expected = whole.generate(_PROMPT, **options)
    fields = {
        "model": str(model),
        "blocks": f"0:{whole.config.num_hidden_layers}",
        "quant": "none",
        "throughput": 100.0,
        "cache_tokens": _CACHE_TOKENS,
        "incoming_bytes": INCOMING_BYTES,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "min_bytes_per_s": _MIN_BYTES_PER_S,
    }
    with (
        ServerProcess(json.dumps(fields), cache=directory, module="tests.attack.attacked_server") as server,
        DistributedModel.from_pretrained(str(model), initial_peers=[server.ready["peer"]]) as remote,
    ):
        target = Attacked(server, ends_only_at_its_length(remote), expected)
        try:
            yield target
        finally:
            target.attacker.close()
            server.kill()  # nobody is left who would have to be let go
