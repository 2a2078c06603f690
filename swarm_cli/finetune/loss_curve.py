"""The loss curve of a fine-tuning run, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_loss_curve(history: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses in ``history``, the ``log_history`` of Hugging Face's ``TrainerState``, to a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        points = sorted({entry["step"]: entry[key] for entry in history if key in entry}.items())
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss per token (nats)")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # of the locator that plots begin with
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
