"""Captions and images as one sequence: causality, losses, shared layers, and drawing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from swarm_training.models.shared_blocks import SharedBlocks
from swarm_training.models.text_to_image import TextToImage, TextToImageConfig

CONFIG = TextToImageConfig(12, 4, image_vocab=5, image_side=3, hidden_size=32, num_heads=2, num_layers=3)


def model(config: TextToImageConfig = CONFIG) -> TextToImage:
    torch.manual_seed(0)
    net = TextToImage(config)
    for parameter in net.parameters():  # so that everything matters
        parameter.data += torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 0.1)
    return net


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 12, (rows, 4), generator=generator), torch.randint(5, (rows, 9), generator=generator)


def logits(net: TextToImage, text: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every text and image token, computed token by token from the tokens before it."""
    texts, images = [], []
    for position in range(4 + 9):
        before = [net.start.expand(len(text), 1, -1)]
        before += [(net.text_tokens(text[:, i]) + net.text_positions[i])[:, None] for i in range(min(position, 4))]
        for i in range(position - 4):
            before.append((net.image_tokens(image[:, i]) + net.rows[i // 3] + net.columns[i % 3])[:, None])
        last = net.norm(net.layers(torch.cat(before, 1))[0][:, -1])
        texts += [net.text_head(last)] * (position < 4)
        images += [net.image_head(last)] * (position >= 4)
    return torch.stack(texts, 1), torch.stack(images, 1)


def test_losses_are_those_of_each_token_given_those_before() -> None:
    net = model()
    text, image = batch()
    text[0, 2:] = 0
    text_logits, image_logits = logits(net, text, image)
    output = net(text, image)
    is_text = text != 0
    torch.testing.assert_close(output.text_loss, functional.cross_entropy(text_logits[is_text], text[is_text]))
    expected = functional.cross_entropy(image_logits.flatten(0, 1), image.flatten())
    torch.testing.assert_close(output.image_loss, expected)
    torch.testing.assert_close(output.loss, (output.text_loss + 7 * output.image_loss) / 8)


def test_captions_of_nothing_but_padding_cost_nothing() -> None:
    text, image = batch()
    output = model()(torch.zeros_like(text), image)
    assert output.text_loss.item() == 0 and output.loss.isfinite()


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_shared_layers_are_the_sums_over_layers(groups: int) -> None:
    config = replace(CONFIG, num_layers=4, num_groups=groups)
    shared = model(config)
    own = TextToImage(replace(config, num_groups=4))
    own.load_state_dict(shared.state_dict(), strict=False)
    each = 4 // groups
    for layer, block in enumerate(own.layers.blocks):
        block.load_state_dict(shared.layers.blocks[layer // each].state_dict())
    losses = [net(*batch()).loss for net in (shared, own)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for number, block in enumerate(shared.layers.blocks):
        for name, parameter in block.named_parameters():
            grads = [own.layers.blocks[number * each + i].get_parameter(name).grad for i in range(each)]
            torch.testing.assert_close(parameter.grad, torch.stack(grads).sum(0), rtol=1e-4, atol=1e-6)
    for name, parameter in own.named_parameters():
        if "blocks" not in name:
            torch.testing.assert_close(parameter.grad, shared.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_shared_layers_have_the_parameters_of_one() -> None:
    sizes = [sum(p.numel() for p in SharedBlocks(32, 2, layers, 1).parameters()) for layers in (1, 12)]
    assert sizes[0] == sizes[1]


def test_the_likeliest_image_with_a_cache_is_that_without() -> None:
    net = model()
    text, _ = batch()
    image = torch.zeros(4, 9, dtype=torch.int64)
    for position in range(9):
        with torch.no_grad():
            image[:, position] = logits(net, text, image)[1][:, position].argmax(-1)
    assert torch.equal(net.sample(text, temperature=0), image)
    assert torch.equal(net.sample(text, top_k=1), image)
    assert len({tuple(row) for row in image.tolist()}) > 1 and len(image.unique()) > 2


def test_samples_are_distributed_as_the_model_says() -> None:
    net = model(replace(CONFIG, image_side=1))
    text = batch(1)[0].expand(4000, -1)
    with torch.no_grad():
        hidden = net.norm(net.layers(net._text_inputs(text[:1]))[0][:, -1])
        scores = net.image_head(hidden)[0]
    generator = torch.Generator().manual_seed(0)
    drawn = net.sample(text, temperature=0.7, generator=generator)[:, 0]
    expected = (scores / 0.7).softmax(-1)
    torch.testing.assert_close(drawn.bincount(minlength=5) / 4000, expected, rtol=0, atol=0.04)
    likeliest = set(scores.topk(2).indices.tolist())
    assert set(net.sample(text, top_k=2, generator=generator)[:, 0].tolist()) == likeliest


def test_the_same_generator_draws_the_same() -> None:
    net = model()
    text, _ = batch()
    draws = [net.sample(text, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].shape == (4, 9)


def test_it_learns_to_draw_what_is_asked_for() -> None:
    torch.manual_seed(0)
    net = TextToImage(CONFIG)
    text, image = torch.arange(1, 5)[:, None].expand(4, 4), batch()[1]
    untrained = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        net(text, image).loss.backward()
        optimizer.step()
    assert torch.equal(net.sample(text, temperature=0), image)
    assert (untrained.sample(text, temperature=0) == image).float().mean() < 0.6


@pytest.mark.parametrize(("layers", "groups", "heads"), [(4, 3, 2), (4, 0, 2), (4, 2, 5)])
def test_what_cannot_be_divided_is_refused(layers: int, groups: int, heads: int) -> None:
    with pytest.raises(ValueError, match="cannot"):
        SharedBlocks(32, heads, layers, groups)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_k": 6}])
def test_ways_to_sample_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        model().sample(batch()[0], **wrong)
