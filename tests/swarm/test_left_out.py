"""Outputs of routers and dropout of blocks, which servers leave out: what asks for them is refused, or said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from swarm_client import RequestRejected
from swarm_client.model.left_out import notes_on_training
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import Pair, connected, hosted, random_ids, started
from tests.swarm.tuning import assert_close

IDS = random_ids(2, 9, seed=1)
asked = pytest.mark.parametrize("method", ["forward", "generate", "base_model"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    config = {"output_router_logits": True}  # as some checkpoints have it
    with started(tmp_path_factory.mktemp("mixtral"), "0:2", "2:6", name="mixtral", config=config) as pair:
        yield pair


@pytest.mark.parametrize("in_config", [True, False])
@asked
def test_an_argument_is_refused(pair, method, in_config):
    pair.remote.config.output_router_logits = in_config
    options = {"max_new_tokens": 2} if method == "generate" else {}
    try:
        with pytest.raises(RequestRejected, match=r"routers.*stays on the servers: set output_router_logits=False"):
            getattr(pair.remote, method)(IDS, output_router_logits=True, **options)
    finally:
        pair.remote.config.output_router_logits = True


def test_a_loss_that_would_lack_a_part_is_refused(pair):
    for arguments in ({"labels": IDS}, {"labels": IDS, "output_router_logits": None}):
        with pytest.raises(RequestRejected, match=r"auxiliary loss.*stays on the servers: set output_router_logits=F"):
            pair.remote(IDS, **arguments)
    local, remote = (model(IDS, labels=IDS, output_router_logits=False).loss for model in (pair.whole, pair.remote))
    assert_close(remote, local)
    assert (pair.whole(IDS, labels=IDS).loss - local).abs() > 1e-4  # what is missing


def test_inference_works_though_the_config_asks(pair):
    with torch.no_grad():
        assert_close(pair.remote(IDS).logits, pair.whole(IDS).logits)
        assert_close(pair.remote.base_model(IDS).last_hidden_state, pair.whole.base_model(IDS).last_hidden_state)
    assert_close(pair.remote(IDS, use_cache=False).logits, pair.whole(IDS, use_cache=False).logits)
    whole, remote = pair.both(IDS)
    assert torch.equal(whole, remote)


def test_a_config_that_does_not_ask_gives_the_loss(pair):
    with connected(pair.servers, output_router_logits=False) as remote:
        assert_close(remote(IDS, labels=IDS).loss, pair.whole(IDS, labels=IDS, output_router_logits=False).loss)


def test_a_command_trains_without_and_says_so(pair):
    with connected(pair.servers) as remote:
        (note,) = notes_on_training(remote)
        assert "output_router_logits" in note and "\n" not in note
        assert torch.isfinite(remote(IDS, labels=IDS).loss)
        assert notes_on_training(remote) == []


# ------------------------------------------------------------ dropout


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[InProcessServers]:
    with hosted(tmp_path_factory.mktemp("gpt2"), "0:6", name="gpt2") as servers:
        yield servers


@pytest.fixture
def said(caplog):
    """What the client has warned of."""
    caplog.set_level(logging.WARNING, logger="swarm_client")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("swarm_client")]


def test_a_model_that_is_trained_says_it_once(servers, said):
    with connected(servers) as remote:
        remote(IDS, labels=IDS)
        with torch.no_grad():
            remote.train()(IDS, labels=IDS)
        remote.eval().generate(IDS, max_new_tokens=2)
        assert said() == []
        remote.train()
        for _ in range(2):
            remote(IDS, labels=IDS)
        (text,) = said()
        assert "attn_pdrop=0.1" in text and "resid_pdrop=0.1" in text and "embd" not in text


def test_a_command_that_said_it_says_no_more(servers, said):
    with connected(servers) as remote:
        (note,) = notes_on_training(remote)
        assert "attn_pdrop=0.1" in note and "\n" not in note
        remote.train()(IDS, labels=IDS)
        assert said() == []
