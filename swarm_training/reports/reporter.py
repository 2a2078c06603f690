"""The interface of the places that numbers are reported to, and the choice of one by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol


class RunReporter(Protocol):
    """A place that keeps the numbers of a run by global step."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep the numbers of a step. A step that is not above the last one means that the run has gone back.

        Raises OSError if they cannot be written.
        """

    def close(self) -> None:
        """Write everything that has been added."""


# Opens the place for a run of this name. Raises ValueError if it cannot be opened.
OpenReporter = Callable[[str], RunReporter]
_KINDS = {  # by what stands before the colon: the module of ours, its class, and the module that it needs
    "tensorboard": ("tensorboard_reporter", "TensorBoardReporter", "torch.utils.tensorboard"),
    "wandb": ("wandb_reporter", "WandbReporter", "wandb"),
}
EXPECTED = "tensorboard:DIR or wandb:PROJECT"


def parse_report(text: str) -> OpenReporter:
    """Return what opens the place that ``text`` names, such as ``tensorboard:logs`` for a directory. Raise ValueError
    if the text names no such place, or the package that it needs is not installed."""
    kind, _, where = text.partition(":")
    if kind not in _KINDS or not where:
        raise ValueError(f"--report is {text!r}: expected {EXPECTED}")
    module, name, needed = _KINDS[kind]
    try:
        import_module(needed)
    except ImportError as error:
        raise ValueError(
            f"--report {text} needs {kind}, which cannot be imported ({error}): expected it to be installed, by "
            f"`pip install {_INSTALLED_BY[kind]}`"
        ) from None
    reporter = getattr(import_module(f"swarm_training.reports.{module}"), name)
    return lambda run: reporter(where, run)


_INSTALLED_BY = {"tensorboard": '"swarm-lm[report]"', "wandb": "wandb"}
