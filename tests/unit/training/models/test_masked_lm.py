"""ALBERT with shared layers beside a copy whose layers have parameters of their own."""

from __future__ import annotations

import re

import torch

from swarm_training.models.masked_lm import MaskedLMConfig, masked_lm

CONFIG = MaskedLMConfig(50, max_length=16, embedding_size=8, hidden_size=16, num_heads=2, num_layers=3)
GROUP = re.compile(r"albert_layer_groups\.(\d+)\.")


def test_gradients_of_shared_layers_are_the_sums_over_layers() -> None:
    torch.manual_seed(0)
    shared = masked_lm(CONFIG)
    own = masked_lm(MaskedLMConfig(**{**CONFIG.__dict__, "num_groups": 3}))
    state = shared.state_dict()
    own.load_state_dict({name: state[GROUP.sub("albert_layer_groups.0.", name)] for name in own.state_dict()})
    ids = torch.randint(50, (4, 16))
    labels = torch.where(torch.rand(4, 16) < 0.3, ids, -100)
    losses = [model(input_ids=ids, labels=labels).loss for model in (shared, own)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    sums: dict[str, torch.Tensor] = {}
    for name, parameter in own.named_parameters():
        target = GROUP.sub("albert_layer_groups.0.", name)
        if parameter.grad is not None:
            sums[target] = sums.get(target, torch.zeros_like(parameter)) + parameter.grad
    compared = 0
    for name, parameter in shared.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, sums[name], rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared > 20
    assert sum(p.numel() for p in own.parameters()) > 2 * sum(p.numel() for p in shared.parameters())


def test_labels_that_are_ignored_do_not_count() -> None:
    torch.manual_seed(0)
    model = masked_lm(CONFIG)
    ids = torch.randint(50, (2, 16))
    labels = torch.full_like(ids, -100)
    labels[0, 3] = ids[0, 3]
    output = model(input_ids=ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[0, 3], ids[0, 3])
    torch.testing.assert_close(output.loss, expected)
