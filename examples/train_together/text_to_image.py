"""Four peers train a small Transformer that draws the digit which a caption asks for.

    python examples/train_together/text_to_image.py --output drawings
    python examples/train_together/text_to_image.py --caption "bold narrow seven, leaning left"

Images are half of scikit-learn's digits, as 64 tokens each; captions follow from their image moments. A classifier that
has learned from the other half says whether the drawings are what was asked for.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from captions import (
    DIGITS,
    LEANS,
    LEVELS,
    SIDE,
    STROKES,
    TEXT_LENGTH,
    WIDTHS,
    WORDS,
    halves,
    sentence,
    to_images,
    to_tokens,
    tokens_of,
    training_data,
)
from drawing_model import DrawingModel
from peers import Joined, Pace, Peer, Plan, Work, events
from sklearn.svm import SVC

PACES = (Pace(16), Pace(8, pause_s=0.1), Pace(16, pause_s=0.2), Pace(4, pause_s=0.05))
PEAK_RATE, WARMUP_STEPS, LEAST_RATE = 3e-3, 30, 0.05  # the last as a share of the peak
TEMPERATURE = 0.7
NUM_HELD_OUT = 64


@dataclass(frozen=True)
class Size:
    hidden: int = 64
    layers: int = 4  # that share one block
    batch: int = 48
    steps: int = 500
    drawings: int = 20  # of each digit, for the classifier


QUICK = Size(hidden=16, layers=2, batch=48, steps=6, drawings=1)


def build_model(size: Size) -> DrawingModel:
    torch.manual_seed(0)
    return DrawingModel(len(WORDS), TEXT_LENGTH, LEVELS, SIDE, size.hidden, size.layers)


def build(size: Size) -> Work:
    """The same model for all who call it."""
    model = build_model(size)
    training, describer = training_data()
    images, digits = halves()[1]
    images, digits = images[:NUM_HELD_OUT], digits[:NUM_HELD_OUT]
    held_out_captions, held_out_images = describer.describe(images, digits), to_tokens(images)

    def loss(numbers: torch.Tensor) -> torch.Tensor:
        return model(training.captions[numbers], training.images[numbers])

    @torch.no_grad()
    def held_out_loss() -> float:
        return model(held_out_captions, held_out_images).item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    return Work(model, optimizer, len(training), loss, held_out_loss, functools.partial(rate, steps=size.steps))


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def train(plan: Plan, steps: int) -> None:
    """Until the run has taken so many steps, and all peers have left."""
    peers = [Peer(plan, 0, PACES[0], [])]
    is_ending = False
    for peer, event in events(peers):
        if isinstance(event, Joined):
            if peer.part == 0:
                peers += [Peer(plan, part, pace, event.initial_peers) for part, pace in enumerate(PACES[1:], 1)]
            elif all(each.joined for each in peers):
                for each in peers:
                    each.go()
            continue
        if event.held_out_loss is not None:
            print(f"step {event.step}: {len(event.group)} peers, loss {event.held_out_loss:.3f}", flush=True)
        if event.step >= steps and not is_ending:
            is_ending = True
            for each in peers:
                each.leave()


def parse_caption(text: str) -> list[int]:
    """Tokens of a caption in any order of words; what it leaves out is upright, medium and regular.

    Raises:
        ValueError: a word is not known, or there is no digit.
    """
    rest = " ".join(re.findall(r"\w+", text.lower()))
    chosen = []
    for words, default in ((DIGITS, None), (LEANS, "upright"), (STROKES, "medium"), (WIDTHS, "regular")):
        any_of_them = rf"\b(?:{'|'.join(words)})\b"
        found = re.findall(any_of_them, rest)
        if len(found) > 1 or not (found or default):
            raise ValueError(f"caption {text!r}: expected one of {', '.join(words)}")
        chosen.append(found[0] if found else default)
        rest = re.sub(any_of_them, "", rest)
    if unknown := set(rest.split()) - {"a", "an"}:
        raise ValueError(f"caption {text!r}: the model does not know {', '.join(sorted(unknown))}")
    return tokens_of(*chosen)


def asked_for(per_digit: int) -> torch.Tensor:
    """[10 · per_digit, 4]: captions of every digit, in which all descriptions take turns."""
    described = list(itertools.product(LEANS, STROKES, WIDTHS))
    picked = [
        described[(7 * number + 5 * digit) % len(described)] for digit in range(10) for number in range(per_digit)
    ]
    return torch.tensor([tokens_of(DIGITS[number // per_digit], *words) for number, words in enumerate(picked)])


def drawn(model: DrawingModel, captions: torch.Tensor) -> torch.Tensor:
    """Image tokens [n, 64]; the same ones every time."""
    return model.draw(captions, TEMPERATURE, torch.Generator().manual_seed(0))


def share_right(classifier: SVC, images: torch.Tensor, captions: torch.Tensor) -> float:
    """How many of the drawings the classifier takes for the digit that was asked for."""
    digits = captions[:, 0].numpy() - WORDS.index(DIGITS[0])
    return float((classifier.predict(to_images(images).reshape(-1, 64)) == digits).mean())


def save_png(path: Path, images: torch.Tensor, captions: torch.Tensor) -> None:
    """Drawings above one another's captions, five in a row."""
    from matplotlib import pyplot  # here, as peers do not need it

    figure, axes = pyplot.subplots(math.ceil(len(images) / 5), 5, figsize=(13, 2.6 * math.ceil(len(images) / 5)))
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption in zip(axes.flat, to_images(images), captions, strict=False):
        axis.imshow(image, cmap="gray_r", vmin=0, vmax=16)
        axis.set_title(sentence(caption).replace(", leaning", ",\nleaning"), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("drawings"), help="folder for before.png and after.png")
    parser.add_argument("--caption", action="append", default=[], help="what to draw; may be given several times")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps, to see that it works")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    try:
        shown = torch.tensor([parse_caption(text) for text in arguments.caption]) if arguments.caption else asked_for(1)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(parents=True, exist_ok=True)
    images, digits = halves()[1]
    classifier = SVC(gamma=0.001, C=10).fit(images.reshape(-1, 64), digits)
    known, known_digits = halves()[0]
    print(f"the classifier names {classifier.score(known.reshape(-1, 64), known_digits):.0%} of images right")
    model = build_model(size)
    tested = asked_for(size.drawings)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "model.pt"
        plan = Plan("text-to-image", functools.partial(build, size), size.batch, len(PACES), 25, result)
        before = share_right(classifier, drawn(model, tested), tested)
        save_png(arguments.output / "before.png", drawn(model, shown), shown)
        train(plan, size.steps)
        model.load_state_dict(torch.load(result, weights_only=True))
    after = share_right(classifier, drawn(model, tested), tested)
    save_png(arguments.output / "after.png", drawn(model, shown), shown)
    print(f"named right of {len(tested)} drawings: {before:.0%} before, {after:.0%} after")


if __name__ == "__main__":
    main()
