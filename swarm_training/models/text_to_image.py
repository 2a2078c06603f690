"""A small Transformer that draws an image for a caption, as DALL-E does (Ramesh et al., 2021). A caption and its image
are one sequence of tokens, and each token is predicted from the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_training.models.shared_blocks import KeysValues, SharedBlocks

TEXT_WEIGHT, IMAGE_WEIGHT = 1, 7  # weights of the losses, as in DALL-E
_INITIAL_STD = 0.02


@dataclass(frozen=True)
class TextToImageConfig:
    """The sizes of a text-to-image model.

    Attributes:
        text_vocab: the number of caption tokens; ``pad``, one of them, fills short captions and is not learned.
        text_length: the tokens of a caption; image_side: the rows and the columns of an image.
        image_vocab: the number of levels of an image token.
        num_groups: the number of blocks that the layers share.
    """

    text_vocab: int
    text_length: int
    image_vocab: int = 16
    image_side: int = 8
    hidden_size: int = 128
    num_heads: int = 4
    num_layers: int = 6
    num_groups: int = 1
    pad: int = 0

    @property
    def image_length(self) -> int:
        return self.image_side**2


@dataclass(frozen=True)
class TextToImageOutput:
    """The losses of a batch; ``loss`` is the mean of the text and image losses, weighted 1:7."""

    loss: Tensor
    text_loss: Tensor
    image_loss: Tensor


class TextToImage(nn.Module):
    """A Transformer over a start token, the caption, and the image's tokens row by row, without the last one."""

    def __init__(self, config: TextToImageConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.start = nn.Parameter(torch.zeros(size))
        self.text_tokens = nn.Embedding(config.text_vocab, size)
        self.text_positions = nn.Parameter(torch.zeros(config.text_length, size))
        self.image_tokens = nn.Embedding(config.image_vocab, size)
        self.rows = nn.Parameter(torch.zeros(config.image_side, size))
        self.columns = nn.Parameter(torch.zeros(config.image_side, size))
        self.layers = SharedBlocks(size, config.num_heads, config.num_layers, config.num_groups)
        self.norm = nn.LayerNorm(size)
        self.text_head = nn.Linear(size, config.text_vocab)
        self.image_head = nn.Linear(size, config.image_vocab)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_INITIAL_STD)

    def forward(self, text: Tensor, image: Tensor) -> TextToImageOutput:
        """Return the losses of a batch. text: [batch, text_length]; image: [batch, image_length]; both int64."""
        hidden = torch.cat([self._text_inputs(text), self._image_inputs(image[:, :-1])], 1)
        hidden = self.norm(self.layers(hidden)[0])
        text_logits = self.text_head(hidden[:, : self.config.text_length])
        image_logits = self.image_head(hidden[:, self.config.text_length :])
        num_tokens = (text != self.config.pad).sum().clamp(min=1)
        text_loss = functional.cross_entropy(
            text_logits.transpose(1, 2), text, ignore_index=self.config.pad, reduction="sum"
        )
        text_loss = text_loss / num_tokens
        image_loss = functional.cross_entropy(image_logits.transpose(1, 2), image)
        loss = (TEXT_WEIGHT * text_loss + IMAGE_WEIGHT * image_loss) / (TEXT_WEIGHT + IMAGE_WEIGHT)
        return TextToImageOutput(loss, text_loss, image_loss)

    @torch.no_grad()
    def sample(
        self, text: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return image tokens [batch, image_length] for captions [batch, text_length].

        temperature: 0 takes the likeliest token. top_k: draw from that many likeliest tokens; None: from all.

        Raises:
            ValueError: the temperature is negative, or top_k is not between 1 and the number of image tokens.
        """
        if not temperature >= 0:
            raise ValueError(f"a temperature of {temperature} is out of range: expected 0 or more")
        if top_k is not None and not 1 <= top_k <= self.config.image_vocab:
            raise ValueError(f"top_k {top_k} is out of range: expected 1 to {self.config.image_vocab}, or None")
        drawn: list[Tensor] = []
        hidden: Tensor = self._text_inputs(text)
        cache: list[KeysValues] | None = None
        for position in range(self.config.image_length):
            hidden, cache = self.layers(hidden, cache)
            logits = self.image_head(self.norm(hidden[:, -1]))
            drawn.append(_draw(logits, temperature, top_k, generator))
            hidden = self._image_inputs(drawn[-1][:, None], start=position)
        return torch.stack(drawn, 1)

    def _text_inputs(self, text: Tensor) -> Tensor:
        """Return the embedded start token and captions, [batch, 1 + text_length, hidden size]."""
        start = self.start.expand(len(text), 1, -1)
        return torch.cat([start, self.text_tokens(text) + self.text_positions], 1)

    def _image_inputs(self, image: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(start, start + image.shape[1], device=image.device)
        side = self.config.image_side
        embedded: Tensor = self.image_tokens(image) + self.rows[places // side] + self.columns[places % side]
        return embedded


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row, [batch], from logits [batch, tokens]."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        kept = logits.topk(top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
