"""The dropout of a model's own blocks, which servers compute without: whoever trains is told, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from swarm_client.model.left_out import notes_on_training
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, hosted, random_ids

IDS = random_ids(2, 9, seed=1)


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
