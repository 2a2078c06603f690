"""Which files a client takes for a model: its own, or those of members whose swarm it joins before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_cli.command_line import parse_args
from swarm_cli.commands.flags import model_choice
from swarm_cli.doctor.check import findings_of
from swarm_cli.doctor.model_files import model_checks
from swarm_cli.finetune.finetune import open_model
from swarm_cli.finetune.settings import FinetuneSettings
from swarm_client.core.config import ClientConfig
from swarm_client.generation.opening import tokenizer_at
from swarm_client.model.model import load_client
from swarm_client.swarm.caller import ClientIdentity
from swarm_client.weights.opening import ModelOpening
from swarm_models.checkpoints import files
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, FROM_SWARM, locate
from swarm_models.sharing import obtaining
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_server.core.config import ServerConfig
from swarm_server.node import server
from tests.unit.server.weights.test_obtaining import PEER, Member, made
from tests.unit.support import run

WITH_PEERS = ClientConfig(initial_peers=(PEER,))


class Net:
    """The DHT and the connections of a client, without a network.

    Attributes:
        joined: how often it was joined.
        left: what was closed.
    """

    def __init__(self, *members: Member) -> None:
        self.members, self.joined, self.left = members, 0, list[str]()

    async def join(self, _config: ClientConfig) -> Net:
        self.joined += 1
        return self

    async def connect(self, record: Any, _config: ClientConfig) -> Any:
        member = next(member for member in self.members if member.record.peer_id == record.peer_id)

        async def close() -> None:
            self.left.append(record.peer_id)

        return SimpleNamespace(stub=member, close=close)

    async def models(self) -> dict[str, int]:
        return {member.model: member.num_blocks for member in self.members}

    async def view(self, model: str, _num_blocks: int) -> SwarmView:
        return SwarmView(tuple(member.record for member in self.members if member.model == model))

    async def shutdown(self) -> None:
        self.left.append("dht")


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Net:
    """A swarm with one model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(obtaining, "_LOOK_S", 0.0)
    net = Net(Member(made(tmp_path / "first" / "tiny")))
    monkeypatch.setattr(ClientIdentity, "join", lambda _caller, config: net.join(config))
    monkeypatch.setattr(ClientIdentity, "connect", lambda _caller, record, config: net.connect(record, config))
    return net


@contextlib.contextmanager
def opening(config: ClientConfig = WITH_PEERS) -> Iterator[ModelOpening]:
    with contextlib.closing(ModelOpening(config)) as opening:
        yield opening


@pytest.mark.parametrize("name", [FROM_SWARM, "swarm://tiny", "tiny"])
def test_a_client_has_its_part_from_members(
    name: str, net: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opening() as files:
        checkpoint = files.open(name, None)
        model = load_client(checkpoint, AutoModelForCausalLM, "auto", torch.device("cpu"))
    assert Path(model.name_or_path).is_relative_to(tmp_path / "cache" / "swarm" / "hub" / "models--tiny")
    original = AutoModelForCausalLM.from_pretrained(locate(DEFAULT_MODEL), dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    assert torch.equal(model.get_output_embeddings().weight, original.get_output_embeddings().weight)
    tokenizer = tokenizer_at(model.name_or_path, checkpoint.revision)
    assert (
        tokenizer("Sort a list").input_ids
        == AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))("Sort a list").input_ids
    )
    assert (net.joined, net.left) == (1, ["first", "dht"])
    assert "tiny: not on this machine" in caplog.text


def test_the_swarm_is_joined_once(net: Net) -> None:
    with opening() as files:
        swarm = files.swarm(files.open(FROM_SWARM, None))
    assert (swarm.model, swarm.revision, swarm.closed) == ("tiny", net.members[0].record.revision, False)
    assert net.left == ["first"]  # the node is the connection's now


def test_a_model_that_cannot_be_split_leaves_the_swarm(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_config: Any) -> None:
        raise UnsupportedModel("it has no blocks")

    with opening() as files:
        checkpoint = files.open(FROM_SWARM, None)
        checkpoint.__dict__.pop("family", None)
        monkeypatch.setattr("swarm_models.checkpoints.checkpoint.describe", refused)
        with pytest.raises(UnsupportedModel):
            files.swarm(checkpoint)
    assert net.left == ["first", "dht"]


def test_only_the_files_that_the_user_knows_are_taken(net: Net) -> None:
    known = net.members[0].record.weights.hex()
    with opening(replace(WITH_PEERS, weights=known)) as files:
        assert files.open("swarm://tiny", None).files.store.manifest.digest.hex() == known
        with pytest.raises(ValueError, match="may come from this machine or the hub: expected model swarm://tiny"):
            files.open("tiny", None)
    sentence = rf"no member offers the weights {'0' * 64}: expected one of"
    with opening(replace(WITH_PEERS, weights="0" * 64)) as files, pytest.raises(CheckpointError, match=sentence):
        files.open("swarm://tiny", None)


def test_finetune_and_doctor_have_the_model_from_members(net: Net, tmp_path: Path) -> None:
    settings = FinetuneSettings(model="swarm://tiny", data=tmp_path, output=tmp_path, initial_peers=(PEER,))
    tokenizer, config = open_model(settings)
    assert tokenizer("Sort a list").input_ids and config.model_type == "llama"
    found = [finding for check in model_checks("swarm://tiny", None, WITH_PEERS) for finding in findings_of([check])]
    assert "swarm://tiny can be loaded: llama, 20 blocks" in found[-1].found


def test_what_is_on_this_machine_needs_no_swarm(net: Net) -> None:
    with opening() as files:
        assert files.open(DEFAULT_MODEL, None).location == locate(DEFAULT_MODEL)
    with opening(ClientConfig()) as files, pytest.raises(CheckpointError, match="neither a directory nor"):
        files.open("tiny", None)
    assert net.joined == 0


def test_what_the_hub_refuses_does_not_come_from_the_swarm(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: Any, **_options: Any) -> None:
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr(files, "hf_hub_download", refused)
    with opening() as client, pytest.raises(CheckpointError, match="tiny is gated: accept its terms on the hub"):
        client.open("tiny", None)
    monkeypatch.setattr(server, "join", None)
    with pytest.raises(CheckpointError, match="tiny is gated: accept its terms on the hub"):
        run(server._open(ServerConfig(model="tiny", initial_peers=(PEER,)), *[None] * 4))
    assert net.joined == 0


def test_what_the_swarm_does_not_have_either_is_said(net: Net) -> None:
    sentence = (
        "other is neither a directory nor.*; nor does it come from the swarm: .* does not serve other: it has tiny"
    )
    with opening() as files, pytest.raises(CheckpointError, match=sentence):
        files.open("other", None)
    assert net.left == ["dht"]


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], DEFAULT_MODEL),
        (["--initial-peers", PEER], FROM_SWARM),
        (["--initial-peers", PEER, "--model", "owner/model"], "owner/model"),
        (["--model", "swarm://owner/model"], "swarm://owner/model"),
    ],
)
def test_the_model_that_is_asked_without_a_name(arguments: list[str], model: str) -> None:
    assert model_choice(parse_args(["chat", *arguments])).model == model
