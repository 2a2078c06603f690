"""A share whose gradients are averaged while the next one is accumulated."""

from __future__ import annotations

from torch import Tensor

from swarm_training.run.share import NO_LOSS, Asking, Share


class DelayedShare(Share):
    """See ``TrainingConfig.delay``."""

    _given: Tensor | None = None  # the sum that is being averaged
    _given_samples = 0
    _given_losses = NO_LOSS

    def report(self) -> Asking:
        yield from self._measure()
        if self._given is not None:
            if self.samples < self._given_samples and not (yield self._peer.has_averaged()):
                return
            yield from self._finish()
        yield self._peer.report(self.samples)
        yield from self.catch_up()

    def catch_up(self) -> Asking:
        """Starts averaging if the batch is complete, and does not wait for the result."""
        while (yield self._peer.is_due()):
            if (yield self._peer.is_lost()):
                yield from self.load()
                continue
            self._given, self._given_samples = self._sum.clone(), self.samples
            self._given_losses = self._losses, self._loss_samples
            self._clear()
            yield self._peer.start_averaging(self._given / max(self._given_samples, 1))
            return

    def _finish(self) -> Asking:
        """Applies the average; if there is none, what was given for it belongs to this share again."""
        averaged = yield self._peer.averaged()
        assert self._given is not None
        given, self._given = self._given, None
        if averaged is not None:
            yield from self._apply(averaged, self._given_losses)
            return
        self._sum += given
        self.samples += self._given_samples
        self._losses += self._given_losses[0]
        self._loss_samples += self._given_losses[1]
