"""What a client does when servers are missing, full, gone or serve something else: wait, go round, or say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TextIteratorStreamer

from swarm_client import DistributedModel, NoRoute, RecoveryFailed
from swarm_protocol.span import Span
from tests.swarm.harness import InProcessServers, Numbers, Watcher
from tests.zoo import VOCAB

PROMPT = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def expected(llama) -> torch.Tensor:
    return generate(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))


@pytest.fixture
def servers(llama) -> Iterator[InProcessServers]:
    with InProcessServers(llama) as servers:
        yield servers


@pytest.fixture
def connect(servers) -> Iterator[Callable[..., PreTrainedModel]]:
    models: list[PreTrainedModel] = []

    def connect(**options) -> PreTrainedModel:
        options = {"initial_peers": servers.initial_peers, "swarm": servers.swarm, "draft": "none", **options}
        models.append(DistributedModel.from_pretrained(str(servers.model), **options))
        return models[-1]

    yield connect
    for model in models:
        model.close()


def generate(model: PreTrainedModel, **options) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


# ------------------------------------------------------------ missing


def test_blocks_that_nobody_serves_are_named(servers, connect):
    servers.start("0:2", "3:5")
    model = connect(wait_timeout_s=0.6)
    with pytest.raises(NoRoute, match=r"no server holds blocks 2:3, 5:6; waited 0\.6 s") as caught:
        generate(model)
    assert caught.value.missing == (Span(2, 3), Span(5, 6))
    with pytest.raises(NoRoute, match="no server holds blocks 2:3"):
        model.blocks[0:5](torch.zeros(1, 3, model.config.hidden_size))


# ------------------------------------------------------------ gone


def test_a_server_killed_in_the_middle_is_an_error_at_once_if_the_user_wants_it_so(
    servers, connect, expected, server_process
):
    """And the next generation goes through whoever takes its place."""
    servers.start("0:4")
    arguments = ["--model", str(servers.model), "--quant", "none", "--throughput", "100", "--swarm", servers.swarm]
    doomed = server_process(*arguments, "--blocks", "4:6", "--initial-peers", *servers.initial_peers)
    model = connect(recovery_timeout_s=0)
    assert torch.equal(generate(model), expected)
    with pytest.raises(
        RecoveryFailed, match=r"blocks 4:6 could not be moved .* within 0 s: .* Nothing is lost"
    ) as caught:
        generate(model, streamer=Watcher(3, doomed.kill))
    assert caught.value.peer_id == doomed.ready["peer"].rpartition("/p2p/")[2]
    assert caught.value.span == Span(4, 6)
    servers.start("4:6")
    assert torch.equal(generate(model), expected)
    servers.wait_until_all_room_is_free()


def test_a_failure_ends_the_stream_that_another_thread_reads(servers, connect):
    servers.start("0:4")
    model = connect(wait_timeout_s=0)
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True)
    with ThreadPoolExecutor() as thread:
        generation = thread.submit(generate, model, streamer=streamer)
        assert "".join(streamer) == ""
        assert isinstance(generation.exception(), NoRoute)
