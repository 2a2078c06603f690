"""A server under attack in a process of its own, and an honest client whose tokens must stay right meanwhile."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MIB, WIRE_VERSION
from tests.attack.honest import OPTIONS, PROMPT, Generation, HonestClient
from tests.attack.resources import Resources, resources_of
from tests.quick_keys import new_identity
from tests.swarm.pair import ends_only_at_its_length
from tests.swarm.processes import ServerProcess
from tests.swarm.raw_client import RawClient
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

INCOMING_BYTES = 16 * MIB
STALL_TIMEOUT_S = 2.0
MAX_SESSIONS = 32
NUM_OTHERS = 10
ADAPTER_BYTES = 1 * MIB
CACHE_TOKENS = 2048
_MIN_BYTES_PER_S = 1.0 * MIB


class Attacked:
    """The server, an honest client of it, and an attacker's.

    Attributes:
        honest: whose tokens must stay right.
        attacker: sends what it likes.
        others: clients with keys of their own, to attack with or to see who else gets in.
        cleanup: is closed before the server ends.
        blocks: what the server's blocks make of hidden states, [batch, tokens, hidden_size].
        model: its directory.
    """

    def __init__(
        self,
        server: ServerProcess,
        remote: PreTrainedModel,
        honest: HonestClient,
        blocks: Callable[..., torch.Tensor],
        model: Path,
    ) -> None:
        self.server, self.honest, self.blocks, self.model = server, honest, blocks, model
        self._generations: list[Generation] = []
        self.record: ServerRecord = background.run(remote.blocks.swarm.view(0.0)).servers[0]
        self.cleanup = ExitStack()
        self.attacker = self.cleanup.enter_context(RawClient(self.record))
        credentials = [ClientCredentials(new_identity()) for _ in range(NUM_OTHERS)]
        self.others = [self.cleanup.enter_context(RawClient(self.record, each)) for each in credentials]
        for client in self.others:
            client.describe()  # its connection is there from now on

    def honest_client_goes_on(self, rounds: int = 2) -> None:
        """Returns when it has done so much from now on: in the last round, all was asked for after the call."""
        enough = len(self._generations) + rounds
        wait_for(lambda: len(self._generations) >= enough, "the honest client is served")

    @contextmanager
    def while_an_honest_client_generates(self) -> Iterator[list[Generation]]:
        """Its tokens are right. Afterwards the server has back what it had, and no error in its log."""
        assert not self.honest.generate().problem
        before = self.resources()
        with self.honest.generating() as generations:
            self._generations = generations
            yield generations
        assert [generation.problem for generation in generations if generation.problem] == []
        describe = self.attacker.describe
        wait_for(lambda: describe().cache_tokens_left == CACHE_TOKENS, "the room of sessions has come back")
        after: list[Resources] = []
        try:
            wait_for(
                lambda: after.append(self.resources()) or after[-1].are_back(before), "all is back that was in use"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; before: {before}; after: {after[-1]}") from None
        assert "Traceback" not in self.server.stderr, self.server.stderr

    def resources(self) -> Resources:
        return resources_of(self.server)

    def contract(self, **fields: object) -> pb.Contract:
        record = self.attacker.record
        blocks = pb.Span(start=record.span.start, end=record.span.end)
        known = dict(wire_version=WIRE_VERSION, model=record.model, revision=record.revision, blocks=blocks)
        return pb.Contract(**(known | fields))

    def opening(self, key: bytes | None = None, **fields: object) -> pb.SessionRequest:
        known = dict(contract=self.contract(), session_key=key or secrets.token_bytes(16), batch_size=1)
        return pb.SessionRequest(open=pb.Open(**(known | fields)))


T = TypeVar("T", bound=Attacked)


@contextmanager
def attacked(directory: Path, kind: type[T] = Attacked, **options: object) -> Iterator[T]:
    """``options``: more fields of the server's config."""
    model = directory / "llama"
    save_checkpoint("llama", model)
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    expected, logits = whole.generate(PROMPT, **OPTIONS), whole(PROMPT).logits
    fields = {
        "model": str(model),
        "blocks": f"0:{whole.config.num_hidden_layers}",
        "quant": "none",
        "throughput": 100.0,
        "cache_tokens": CACHE_TOKENS,
        "incoming_bytes": INCOMING_BYTES,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "min_bytes_per_s": _MIN_BYTES_PER_S,
        "max_sessions": MAX_SESSIONS,
        "adapter_bytes": ADAPTER_BYTES,
        **options,
    }
    with (
        ServerProcess(json.dumps(fields), cache=directory, module="tests.attack.attacked_server") as server,
        DistributedModel.from_pretrained(str(model), initial_peers=[server.ready["peer"]], draft="none") as remote,
    ):
        honest = HonestClient(ends_only_at_its_length(remote), expected, logits)
        target = kind(server, remote, honest, partial(_through_blocks, whole), model)
        try:
            with target.cleanup:
                yield target
        finally:
            server.kill()  # nobody is left who would have to be let go


@torch.inference_mode()
def _through_blocks(whole: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Of the model as it is without servers."""
    outputs: list[torch.Tensor] = []
    hook = whole.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        whole.model(inputs_embeds=hidden, use_cache=False)
    finally:
        hook.remove()
    return outputs[0]
