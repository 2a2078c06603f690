"""``RunOptions``: what a peer brings into a run besides the model, the target batch and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.net.identity import Identity
from swarm_training.compression.codecs import TWO_BIT
from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.evaluation.evaluation import Evaluation
from swarm_training.net.membership import RunMembership
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.run.meetings import GradientCompression
from swarm_training.run.state import require_steps


@dataclass(frozen=True)
class RunOptions:
    """The options with which a peer takes part in a run, besides the model, the target batch and the settings.

    Attributes:
        identity: this peer's key; None creates a new one.
        compressor: the object that decides which vectors are averaged in place of the gradient; None: the gradient
            itself is averaged.
        encoder: the memory of what encoding loses, see ``ErrorFeedback``; None: losses are not remembered.
        access, token: the access control and this peer's token, for a private run.
        resumed_at: the moment of the checkpoint (``Checkpoint.moment``) from which this peer has loaded its
            parameters and optimizer; None: it has loaded none. A founder goes on from that checkpoint, or from a newer
            one that other peers offer within ``restart_wait_s`` of the config. A peer that joins offers the checkpoint
            to the founder, and then loads the state of the run.
        local: the steps that this peer takes between two global steps, see ``LocalSteps``; None: there are none.
        resume: a directory of ``TrainingRun.save``, whose newest intact checkpoint is loaded; the rest is as with
            ``resumed_at``. If the directory has no checkpoint, the founder begins at step 0.
        evaluation: the evaluation on held-out data, see ``Evaluation``; None: there is none. All peers of a run
            need the same numbers in it.
    """

    identity: Identity | None = None
    compressor: Compressor | None = None
    encoder: ErrorFeedback | None = None
    access: AccessControl | None = None
    token: bytes = field(default=b"", repr=False)
    resumed_at: Moment | None = None
    local: LocalSteps | None = None
    resume: str | Path | None = None
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        if self.resumed_at is not None and self.resume is not None:
            raise ValueError("resume and resumed_at: expected one of them")

    @property
    def compression(self) -> GradientCompression:
        return GradientCompression(self.compressor or Plain(), self.encoder)

    def membership(self, initial_peers: Sequence[str]) -> RunMembership:
        """Return the membership with which this peer enters the run through ``initial_peers``."""
        return RunMembership(
            self.identity or Identity.generate(), self.token, self.access, initial_peers=list(initial_peers)
        )

    def completed(self, config: TrainingConfig) -> TrainingConfig:
        """Return the config with the numbers of the evaluation. Raise ValueError if the options contradict it."""
        self._check_compressor(config)
        if self.evaluation is not None:
            return replace(config, evaluation=self.evaluation.policy)
        if config.evaluation.every:
            raise ValueError("config has an evaluation: expected evaluation=Evaluation(…), which has its numbers")
        return config

    def check_local(self, parameters: Sequence[nn.Parameter], config: TrainingConfig, target_batch_size: int) -> None:
        """Raise ValueError if these parameters, this config or this batch size exclude the local steps."""
        if self.local is None:
            return
        require_steps(self.local.inner, (parameter for parameter in parameters if parameter.requires_grad))
        if self.local.batch_size > target_batch_size:
            raise ValueError(
                f"batch_size of local steps is {self.local.batch_size}: expected at most the target_batch_size, which "
                f"is {target_batch_size}"
            )
        if config.counting != "samples":
            raise ValueError(
                f"counting is {config.counting!r}, and there are local steps: expected 'samples' with them"
            )
        if self.compressor is not None and self.compressor.state_dict():
            kind = type(self.compressor).__name__
            raise ValueError(f"{kind} has a state: expected a compressor without one for local steps")

    def _check_compressor(self, config: TrainingConfig) -> None:
        """Raise ValueError if the config does not allow the compressor, or its codec needs an encoder."""
        if self.compressor is not None and self.compressor.state_dict():
            kind = type(self.compressor).__name__
            if config.delay:
                raise ValueError(f"delay is on, and {kind} has a state: expected a compressor without one")
            if config.aggregation != "mean":
                raise ValueError(f"aggregation is {config.aggregation!r}, and {kind} has a state: expected one without")
        if config.codec == TWO_BIT and self.encoder is None:
            raise ValueError(f"codec is {TWO_BIT!r}: expected an encoder with it, ErrorFeedback(codec_of({TWO_BIT!r}))")
