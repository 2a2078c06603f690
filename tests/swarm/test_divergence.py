"""Training that diverges says so at once, and no server is blamed; a server that computes nonsense is."""

from __future__ import annotations

import pytest
import torch

from swarm_client import RequestRejected, TrainingDiverged
from swarm_client.swarm.swarm import Swarm
from swarm_server.training.stateless import StatelessPasses
from tests.swarm.pair import connected, random_ids
from tests.swarm.tuning import assert_close, lora, trained, tuned

SPANS = ("0:2", "2:6", "2:6")

IDS = random_ids(2, 9, seed=0)


@pytest.fixture
def banned(monkeypatch) -> list[Exception]:
    errors: list[Exception] = []
    monkeypatch.setattr(Swarm, "failed", lambda _swarm, error: errors.append(error))
    return errors


def loss_of(model) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


@pytest.mark.parametrize(("span", "who"), [(0, "answers twice"), (2, "two servers answer")])
def test_weights_with_which_servers_overflow(servers, banned, span, who):
    with connected(servers) as remote:
        remote.add_adapter(lora(rf".*layers\.{span}\.self_attn\.v_proj"))
        for parameter in trained(remote):
            parameter.data.fill_(1e25)  # finite, as what they are multiplied with
        with pytest.raises(TrainingDiverged, match=f"{who} values .* diverged; lower the learning rate"):
            loss_of(remote)
    assert not banned


@pytest.mark.parametrize("at", ["weights", "loss", "inputs"])
def test_what_is_not_finite_is_not_sent(servers, banned, at):
    messages = {"weights": "adapter's weights", "loss": "gradients", "inputs": "hidden states"}
    with connected(servers) as remote:
        remote.add_adapter(lora())
        inputs = remote.get_input_embeddings()(IDS).detach()
        if at == "weights":
            trained(remote)[0].data[0, 0] = torch.nan
        elif at == "inputs":
            inputs[0, 0] = torch.inf
        with pytest.raises(TrainingDiverged, match=f"the {messages[at]} are not finite .*: training has diverged"):
            (remote(inputs_embeds=inputs, labels=IDS).loss * (torch.inf if at == "loss" else 1)).backward()
    assert not banned


def test_hidden_states_of_a_user_that_are_not_finite(servers, banned):
    with connected(servers) as remote, torch.no_grad(), pytest.raises(RequestRejected, match="not finite") as caught:
        remote.blocks[1:4](torch.full((1, 3, 64), torch.nan))
    assert not isinstance(caught.value, TrainingDiverged) and not banned


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_server_that_answers_nonsense_is_found_out(servers, banned, monkeypatch, direction):
    """One of two servers of the same blocks: the other one's answer says whose fault it is."""
    spoilt: list[StatelessPasses] = []
    computing = StatelessPasses._run_plain

    def nonsense(passes: StatelessPasses, blocks, *arguments):
        output = computing(passes, blocks, *arguments)
        if blocks.start != 2 or (spoilt and passes is not spoilt[0]):
            return output
        spoilt[:] = [passes]
        if direction == "forward":
            return output * torch.nan
        if output.requires_grad:
            output.register_hook(lambda grad: grad * torch.nan)
        return output

    monkeypatch.setattr(StatelessPasses, "_run_plain", nonsense)
    with tuned(servers, lora(init_lora_weights=False)) as pair:
        for model in pair.models:
            loss_of(model).backward()
        for local, remote in zip(*pair.parameters, strict=True):
            assert_close(remote.grad, local.grad)
    assert len(spoilt) == 1
    assert [str(error) for error in banned] == ["the server answered values that are not finite (NaN or infinity)"]
