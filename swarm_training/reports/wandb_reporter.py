"""The reporter that hands numbers to Weights & Biases, which WANDB_MODE=offline keeps on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
        self._error: type[Exception] = wandb.Error

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._as_os_errors():
            self._run.log({**scalars, _STEP: step})

    def close(self) -> None:
        with self._as_os_errors():
            self._run.finish()

    @contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        """Raise OSError in place of errors of Weights & Biases: a reporter may raise no other, and training goes on."""
        try:
            yield
        except self._error as error:
            raise OSError(str(error)) from None
