"""Hidden states and gradients travel in the codec that is asked for, on every link, and what is computed follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from swarm_protocol.codecs.sizes import CODECS, LADDER, encoded_bytes
from swarm_protocol.wire.codec import decode, encode
from swarm_server.core.counters import Counters
from swarm_server.node import server as server_module
from tests.marks import always
from tests.swarm.pair import Pair, connected

SPANS = ("0:3", "3:6")

IDS = torch.arange(3, 40)[None] % 30
LOSSY = LADDER[1:]


@pytest.fixture(scope="module", autouse=True)
def counters() -> Iterator[list[Counters]]:
    """Of all servers that are started."""
    found: list[Counters] = []

    def counted() -> Counters:
        found.append(Counters())
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "Counters", counted)
        yield found


class Rounded(torch.autograd.Function):
    """What travels is rounded, and so is its gradient on the way back."""

    @staticmethod
    def forward(context, hidden: torch.Tensor, name: str) -> torch.Tensor:
        context.name = name
        return there_and_back(hidden, name)

    @staticmethod
    def backward(context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return there_and_back(grad, context.name), None


def there_and_back(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return decode(encode(tensor, CODECS[name])[0])


@contextmanager
def rounding(pair: Pair, to_first: str, between: str, to_client: str) -> Iterator[PreTrainedModel]:
    """The whole model, in which hidden states are rounded on the way to, between and from the servers."""
    layers = pair.whole.model.layers

    def before(_module: object, args: tuple) -> tuple:
        return Rounded.apply(args[0], to_first), *args[1:]

    with ExitStack() as hooks:
        hooks.callback(layers[0].register_forward_pre_hook(before).remove)
        for layer, name in ((layers[2], between), (layers[5], to_client)):
            hook = layer.register_forward_hook(lambda _module, _args, output, name=name: Rounded.apply(output, name))
            hooks.callback(hook.remove)
        yield pair.whole


def rounded_logits(pair: Pair, *names: str) -> torch.Tensor:
    with rounding(pair, *names) as model, torch.no_grad():
        return model(IDS).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def pushed_bytes(counters: list[Counters]) -> int:
    return sum(server.sent_bytes["push"] for server in counters)


@pytest.mark.promise("slow links send hidden states in fewer bits, within a measured error")
@pytest.mark.parametrize("name", always("int4", among=LOSSY))
def test_a_session_is_rounded_on_every_link(pair: Pair, counters: list[Counters], name: str) -> None:
    before = pushed_bytes(counters)
    with connected(pair.servers, compression=name) as remote, torch.no_grad():
        cache = remote.new_cache()
        logits = [remote(IDS[:, :20], past_key_values=cache).logits]
        logits += [remote(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(20, IDS.shape[1])]
    found, expected = torch.cat(logits, dim=1), rounded_logits(pair, name, name, name)
    assert pushed_bytes(counters) - before == IDS.shape[1] * encoded_bytes(name, 1, 64, 4)
    # Sums differ in their order, so a number that is near the middle between two levels may go to the other.
    effect = distance(expected, rounded_logits(pair, "raw", "raw", "raw"))
    assert distance(found, expected) < 0.4 * effect


@pytest.mark.parametrize("name", LOSSY)
def test_passes_and_their_gradients_are_rounded(pair: Pair, name: str) -> None:
    embedded = pair.whole.get_input_embeddings()(IDS).detach()

    def outcome(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = embedded.clone().requires_grad_(True)
        logits = model(inputs_embeds=inputs).logits
        logits.square().mean().backward()
        return logits.detach(), inputs.grad

    exact, exact_grad = outcome(pair.whole)
    with rounding(pair, name, name, name) as model:
        expected, expected_grad = outcome(model)
    with connected(pair.servers, compression=name) as remote:
        logits, grad = outcome(remote)
    assert distance(logits, expected) < 0.4 * distance(expected, exact)
    assert distance(grad, expected_grad) < 0.4 * distance(expected_grad, exact_grad)
