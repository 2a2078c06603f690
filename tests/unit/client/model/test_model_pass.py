"""What stock code adds between blocks is added, wherever it is computed: in passes, on servers, or both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm_client import RequestRejected
from swarm_client.adapters.snapshots import ActiveAdapter
from swarm_client.model.model_pass import DeepStack, ModelPass
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.zoo import BLOCKS, HIDDEN

HIDDEN_STATES = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(3, 3, HIDDEN, generator=torch.Generator().manual_seed(2))  # of three tokens, for three blocks
WHERE = torch.tensor([[False, True, True, False], [False, False, True, False]])


def block_output(block: int, hidden: torch.Tensor) -> torch.Tensor:
    return (0.5 + 0.1 * block) * hidden.tanh()


class Remote:
    """Blocks that compute at once."""

    added = ActiveAdapter()

    def __init__(self, span: Span) -> None:
        self.span = span

    def __getitem__(self, part: slice) -> Remote:
        return Remote(Span(part.start, part.stop))

    def __call__(self, hidden: torch.Tensor, *_given: Any, **_options: Any) -> torch.Tensor:
        return self.computed(BlockInput(hidden))

    def computed(self, inputs: BlockInput) -> torch.Tensor:
        hidden, added = inputs.hidden, inputs.additions
        for block in self.span:
            hidden = block_output(block, hidden)
            if added is not None and block < added.shape[2]:
                hidden = hidden + added[:, :, block]
        return hidden


class Session:
    """A session of servers that compute at once. ``begun`` is what it was told, or what its servers got."""

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.begun: BlockInput | None = None

    def step(self, inputs: BlockInput, _num_wanted: int | None) -> torch.Tensor:
        self.begun = inputs
        return Remote(Span(0, BLOCKS)).computed(inputs)

    def begin_with(self, inputs: BlockInput, _adapter: Any) -> None:
        self.begun = inputs


def model(features: list[torch.Tensor], through: Any) -> torch.Tensor:
    """The stock loop, over the modules that stand for the blocks."""
    hidden = HIDDEN_STATES
    for block in range(BLOCKS):
        hidden = through(block, hidden)
        if block < len(features):
            hidden = hidden.clone()
            hidden[WHERE] = hidden[WHERE] + features[block]
    return hidden


def passed(session: Session | None, features: torch.Tensor, *starts: int) -> torch.Tensor:
    deep_stack = DeepStack(list(features), WHERE)
    remote: Any = Remote(Span(0, BLOCKS))
    model_pass = ModelPass(remote, None, None, session, False, False, [0, *starts], None, deep_stack)  # type: ignore[arg-type]
    output = model(deep_stack.features, model_pass.through)
    model_pass.finish()
    return output


@pytest.mark.parametrize("starts", [(), (2,), tuple(range(1, BLOCKS))])
@pytest.mark.parametrize("session", [None, Session(), Session(7)])
def test_what_is_added_between_blocks(session: Session | None, starts: tuple[int, ...]) -> None:
    expected = model(list(FEATURES), block_output)
    if session is not None and session.length and starts:
        with pytest.raises(RequestRejected, match="pass use_cache=False, or an empty cache"):
            passed(session, FEATURES, *starts)
        return
    assert torch.allclose(passed(session, FEATURES, *starts), expected, atol=1e-6)
    if session is not None:
        assert session.begun is not None
        assert torch.allclose(Remote(Span(0, BLOCKS)).computed(session.begun), expected, atol=1e-6)


def test_gradients_flow_to_what_is_added() -> None:
    grads = []
    for compute in (lambda features: model(list(features), block_output), lambda features: passed(None, features)):
        features = FEATURES.clone().requires_grad_(True)
        compute(features).square().sum().backward()
        grads.append(features.grad)
    assert torch.allclose(*grads, atol=1e-6)
