"""scikit-learn's digits as image tokens, and captions that follow from image moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

LEVELS = 8  # of an image token
BRIGHTEST = 16  # of a pixel of the data
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LEANS = ("leaning left", "upright", "leaning right")
STROKES = ("thin", "medium", "bold")
WIDTHS = ("narrow", "regular", "wide")
WORDS = (*DIGITS, *LEANS, *STROKES, *WIDTHS)  # a word's place is its token
TEXT_LENGTH = 4
SIDE = 8  # rows and columns of an image


@dataclass(frozen=True)
class Captioned:
    """``images``: [n, 64], tokens, row by row; ``captions``: [n, 4], tokens; ``digits``: [n]."""

    images: Tensor
    captions: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.images)


def tokens_of(digit: str, lean: str, stroke: str, width: str) -> list[int]:
    return [WORDS.index(word) for word in (digit, lean, stroke, width)]


def sentence(caption: Tensor) -> str:
    """``a bold, wide seven, leaning left``"""
    digit, lean, stroke, width = (WORDS[token] for token in caption.tolist())
    described = [word for word in (stroke, width) if word not in ("medium", "regular")]
    article = "an" if not described and digit == "eight" else "a"
    return f"{article} {' '.join([*([', '.join(described)] if described else []), digit])}, {lean}"


def moments(images: np.ndarray) -> np.ndarray:
    """[n, 3] of images [n, 8, 8]: slant, ink, and width, the standard deviation of columns.

    The slant is −μ11 / μ02 of the central moments: by how many columns the figure moves to the right per row upwards.
    """
    rows, columns = np.mgrid[: images.shape[1], : images.shape[2]]
    ink = images.sum((1, 2))
    from_row = rows - ((images * rows).sum((1, 2)) / ink)[:, None, None]
    from_column = columns - ((images * columns).sum((1, 2)) / ink)[:, None, None]
    slant = -(images * from_row * from_column).sum((1, 2)) / (images * from_row**2).sum((1, 2))
    return np.stack([slant, ink, np.sqrt((images * from_column**2).sum((1, 2)) / ink)], 1)


@dataclass(frozen=True)
class Describer:
    """Which third of its digit an image is in: a seven that leans left does so among sevens, which lean right.

    ``thirds``: [10, 3, 2], where the thirds of each digit's moments end.
    """

    thirds: np.ndarray

    @classmethod
    def of(cls, images: np.ndarray, digits: np.ndarray) -> Describer:
        values = moments(images)
        return cls(np.stack([np.quantile(values[digits == digit], (1 / 3, 2 / 3), axis=0).T for digit in range(10)]))

    def describe(self, images: np.ndarray, digits: np.ndarray) -> Tensor:
        """Captions [n, 4] of images [n, 8, 8]."""
        places = (moments(images)[:, :, None] > self.thirds[digits]).sum(-1)  # [n, 3], of 0 to 2
        words = zip(digits.tolist(), places.tolist(), strict=True)
        return torch.tensor([tokens_of(DIGITS[d], LEANS[p[0]], STROKES[p[1]], WIDTHS[p[2]]) for d, p in words])


def to_tokens(images: np.ndarray) -> Tensor:
    """[n, 64] of images [n, 8, 8] with values from 0 to 16."""
    return torch.from_numpy(np.rint(images / BRIGHTEST * (LEVELS - 1))).long().flatten(1)


def to_images(tokens: Tensor) -> np.ndarray:
    """[n, 8, 8] of tokens [n, 64]."""
    return tokens.view(-1, 8, 8).numpy() * BRIGHTEST / (LEVELS - 1)


def halves() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and digits to train on, and those of the other half; always the same ones."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    return tuple((data.images[half], data.target[half]) for half in np.array_split(order, 2))


def training_data() -> tuple[Captioned, Describer]:
    images, digits = halves()[0]
    describer = Describer.of(images, digits)
    return Captioned(to_tokens(images), describer.describe(images, digits), torch.from_numpy(digits)), describer
