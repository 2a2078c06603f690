"""A small Transformer that draws an image for a caption, as DALL-E does (Ramesh et al., 2021). Its layers share one
block, as ALBERT's do (Lan et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT_WEIGHT, IMAGE_WEIGHT = 1, 7  # weights of the losses, as in DALL-E
HEADS = 4
INITIAL_STD = 0.02


class DrawingModel(nn.Module):
    """A start token, the caption and the image's tokens row by row are one sequence, and each token is predicted from
    the tokens before it."""

    def __init__(self, words: int, caption_length: int, levels: int, side: int, hidden: int, layers: int) -> None:
        """Create the model for captions of ``caption_length`` words and images of ``side`` × ``side`` levels."""
        super().__init__()
        self.caption_length, self.side, self.layers = caption_length, side, layers
        self.start = nn.Parameter(torch.zeros(hidden))
        self.words = nn.Embedding(words, hidden)
        self.word_positions = nn.Parameter(torch.zeros(caption_length, hidden))
        self.levels = nn.Embedding(levels, hidden)
        self.rows = nn.Parameter(torch.zeros(side, hidden))
        self.columns = nn.Parameter(torch.zeros(side, hidden))
        self.block = nn.TransformerEncoderLayer(
            hidden, HEADS, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(hidden)
        self.word_head = nn.Linear(hidden, words)
        self.level_head = nn.Linear(hidden, levels)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def forward(self, captions: Tensor, images: Tensor) -> Tensor:
        """Return the loss of a batch. captions: [batch, caption length]; images: [batch, side · side]; both int64."""
        hidden = self._hidden(captions, images[:, :-1])
        words = self.word_head(hidden[:, : self.caption_length])
        levels = self.level_head(hidden[:, self.caption_length :])
        word_loss = functional.cross_entropy(words.transpose(1, 2), captions)
        level_loss = functional.cross_entropy(levels.transpose(1, 2), images)
        return (TEXT_WEIGHT * word_loss + IMAGE_WEIGHT * level_loss) / (TEXT_WEIGHT + IMAGE_WEIGHT)

    @torch.no_grad()
    def draw(self, captions: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """Return images, [batch, side · side], for captions, [batch, caption length]."""
        images = captions[:, :0]
        for _ in range(self.side**2):
            levels = self.level_head(self._hidden(captions, images)[:, -1])
            drawn = torch.multinomial((levels / temperature).softmax(-1), 1, generator=generator)
            images = torch.cat([images, drawn], 1)
        return images

    def _hidden(self, captions: Tensor, images: Tensor) -> Tensor:
        """Return the hidden states from which each token after the start token is predicted, and the next one."""
        places = torch.arange(images.shape[1])
        hidden = torch.cat(
            [
                self.start.expand(len(captions), 1, -1),
                self.words(captions) + self.word_positions,
                self.levels(images) + self.rows[places // self.side] + self.columns[places % self.side],
            ],
            1,
        )
        causal = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for _ in range(self.layers):
            hidden = self.block(hidden, src_mask=causal, is_causal=True)
        return self.norm(hidden)
