"""The stock model's list of blocks computes like ``model.blocks``; compilers and odd masks never reach the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from transformers import PreTrainedModel

from swarm_client import RequestRejected
from swarm_client.adapters.snapshots import ActiveAdapter
from swarm_client.model.remote_blocks import RemoteSpan
from swarm_protocol.span import Span
from tests.unit.client.model.test_hollow_blocks import client_of
from tests.zoo import BLOCKS, HIDDEN, save_checkpoint

LISTS = {"llama": "model.layers", "gpt2": "transformer.h"}
HIDDEN_STATES = torch.zeros(1, 3, HIDDEN)
IDS = torch.tensor([[1, 5, 7]])


class NoNetwork(RemoteSpan):
    """All blocks, of which number i adds 2**i to each hidden state, so that the sum says which blocks computed.

    Attributes:
        calls: what else each call was given, and whether a compiler looked into it.
    """

    def __init__(self, span: Span) -> None:
        super().__init__(None, span, None)  # type: ignore[arg-type]  # there is no swarm
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, blocks: slice) -> NoNetwork:
        part = NoNetwork(super().__getitem__(blocks).span)
        part.calls = self.calls
        return part

    @property
    def added(self) -> ActiveAdapter:
        return ActiveAdapter()

    def __call__(self, hidden: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        self.calls.append((*given, torch.compiler.is_dynamo_compiling()))
        return hidden + sum(2.0**block for block in range(self.span.start, self.span.end))


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in LISTS}
    for family, path in found.items():
        save_checkpoint(family, path)
    return found


@pytest.fixture(params=LISTS)
def client(request, directories) -> PreTrainedModel:
    model = client_of(directories[request.param])
    model._remote_blocks[0].connect(NoNetwork(Span(0, BLOCKS)))
    return model


def blocks_of(client: PreTrainedModel) -> Any:
    return client.get_submodule(LISTS[client.config.model_type])


# ------------------------------------------------------------ the list of blocks


@pytest.mark.parametrize(
    ("part", "computed"),
    [
        (lambda blocks: blocks, range(BLOCKS)),
        (lambda blocks: blocks[:2], [0, 1]),
        (lambda blocks: blocks[2:5], [2, 3, 4]),
        (lambda blocks: blocks[-1:], [5]),
        (lambda blocks: blocks[2:][1:3], [3, 4]),  # as in a list
        (lambda blocks: blocks[2:100], [2, 3, 4, 5]),
    ],
)
def test_a_slice_of_the_stock_list_computes_its_blocks(client, part, computed):
    output = part(blocks_of(client))(HIDDEN_STATES)
    assert torch.equal(output, HIDDEN_STATES + sum(2.0**block for block in computed))


def test_mask_and_positions_go_along(client):
    mask, positions = torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]])
    blocks_of(client)[1:3](HIDDEN_STATES, mask, position_ids=positions)
    assert client.blocks.calls == [(mask, positions, False)]


@pytest.mark.parametrize(("part", "found"), [(slice(0, 0), r"\[\]"), (slice(None, None, 2), r"\[0, 2, 4\]")])
def test_blocks_that_do_not_follow_one_another_are_refused(client, part, found):
    with pytest.raises(RequestRejected, match=f"^blocks {found} cannot be called: expected consecutive blocks"):
        blocks_of(client)[part](HIDDEN_STATES)


# ------------------------------------------------------------ masks


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ({"full_attention": torch.ones(1, 1, 3, 3)}, "is a dict"),
        (torch.ones(1, 1, 3, 3), r"has shape \[1, 1, 3, 3\]"),
        (torch.ones(3), r"has shape \[3\]"),
    ],
    ids=["dict", "4-D", "1-D"],
)
def test_a_mask_of_another_kind_is_refused(client, mask, found):
    sentence = rf"^attention_mask {found}: expected a tensor \[batch, tokens\], 0 for padding"
    for call in (
        lambda: client(IDS, attention_mask=mask),
        lambda: client(IDS, attention_mask=mask, use_cache=False),
        lambda: RemoteSpan(None, Span(0, 2), None)(HIDDEN_STATES, mask),  # type: ignore[arg-type]  # nobody is asked
    ):
        with pytest.raises(RequestRejected, match=sentence):
            call()


# ------------------------------------------------------------ torch.compile


@torch.no_grad()
def test_a_compiled_model_runs_as_it_is(client):
    graphs = []
    compiled = torch.compile(client, backend=lambda graph, _inputs: graphs.append(graph) or graph.forward)
    expected = client(IDS, use_cache=False).logits
    assert torch.equal(compiled(IDS, use_cache=False).logits, expected)
    assert not graphs


@torch.no_grad()
def test_a_compiled_part_of_the_model_runs_blocks_as_they_are(client):
    remote = client._remote_blocks[0]
    remote.begin(None, None, None)
    output = torch.compile(blocks_of(client)[0], backend="eager")(HIDDEN_STATES)
    remote.end(None)
    assert torch.equal(output[0] if isinstance(output, tuple) else output, HIDDEN_STATES + 2**BLOCKS - 1)
    assert client.blocks.calls == [(None, ANY, False)]


@pytest.mark.parametrize("shape", [(1, 0, HIDDEN), (0, 3, HIDDEN)])
def test_empty_hidden_states_are_refused(shape: tuple[int, ...]) -> None:
    blocks = RemoteSpan(None, Span(0, BLOCKS), None)  # type: ignore[arg-type]  # the swarm is not asked
    with pytest.raises(RequestRejected, match="are empty: expected some positions"):
        blocks(torch.zeros(shape))
