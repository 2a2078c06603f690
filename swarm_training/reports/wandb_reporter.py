"""The reporter that hands numbers to Weights & Biases, which WANDB_MODE=offline keeps on this machine."""

from __future__ import annotations

from collections.abc import Mapping

_STEP = "step"


class WandbReporter:
    """A run of a project of Weights & Biases. Its x-axis is the global step, which a rollback decreases."""

    def __init__(self, project: str, run: str) -> None:
        """Begin a run of this name. Raises ValueError if Weights & Biases refuses."""
        import wandb  # an extra, which this module can be imported without

        try:
            self._run = wandb.init(project=project, name=run)
        except wandb.Error as error:
            raise ValueError(f"--report wandb:{project} cannot begin: {error}") from None
        self._run.define_metric("*", step_metric=_STEP)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, _STEP: step})

    def close(self) -> None:
        self._run.finish()
