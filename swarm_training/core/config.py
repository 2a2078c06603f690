"""The settings of one peer of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from swarm_training.core.checks import require, require_one_of

WIRE_VERSION = 1
MAX_MEMBERS = 128  # of a group: the leader describes all to each, 16 MB at once, while they wait ``silence_s``
MAX_MICRO_BATCHES = 4096  # of a batch; they take 512 bytes of every record
AGGREGATIONS = ("mean", "centered_clip")
COUNTINGS = ("samples", "exact")
CHUNK_ELEMENTS = 1 << 18  # elements of a vector in one message: 1 MiB in fp32
MAX_WINDOW = 4096  # losses; a joiner receives all of them in one message
NUM_REPLICAS = 2  # checkpoints of the stage before that a peer keeps
SLOW_ROUND_S = 600.0  # the least deadline of a round with local steps, which are for slow lines
_MAX_NAME_CHARS = 200
_MAX_EVERY = 1 << 40
_LEAST_POLL_S = 0.1


def check_run_name(name: str) -> None:
    """Raise ValueError if a run cannot have this name."""
    if not name or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise ValueError(f"the name of a run is {name!r}: expected up to {_MAX_NAME_CHARS} printable characters")


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError if gradients cannot be clipped to this norm."""
    if not 0 <= max_norm < inf:
        raise ValueError(f"max_norm is {max_norm}: expected a number of at least 0 (0: gradients are not clipped)")


def check_average_decay(decay: float) -> None:
    """Raise ValueError if the weights cannot be averaged with this decay."""
    if not 0 <= decay < 1:
        raise ValueError(
            f"average_decay is {decay}: expected a number from 0 (the weights are not averaged) to less than 1, such "
            "as 0.999"
        )


def check_max_samples(max_samples: int) -> None:
    """Raise ValueError if no more than this can count of one peer."""
    if max_samples < 0:
        raise ValueError(f"max_samples is {max_samples}: expected at least 1 sample of one peer, or 0 (all count)")


@dataclass(frozen=True)
class RollbackPolicy:
    """The rule by which a run's losses show that it has diverged. A field out of its range raises ValueError.

    Attributes:
        margin: the most by which a loss may exceed the running median before it is too high.
        patience: the steps in a row with too high a loss that cause a rollback; a loss that is not finite does at once.
        window: the number of losses in the median; losses that are too high are not among them.
        warmup: the number of losses that must be seen before a loss can be too high.
    """

    margin: float = 1.0
    patience: int = 10
    window: int = 100
    warmup: int = 20

    def __post_init__(self) -> None:
        require(self, "margin", 0 < self.margin <= inf, "a number above 0")
        for name in ("patience", "window", "warmup"):
            require(self, name, 1 <= getattr(self, name) <= MAX_WINDOW, f"1 to {MAX_WINDOW}")
        require(self, "warmup", self.warmup <= self.window, f"at most the window, which is {self.window}")


@dataclass(frozen=True)
class EvaluationPolicy:
    """The rule by which a run is evaluated on held-out data and ends. A field out of its range raises ValueError.

    Attributes:
        every: the steps between two evaluations; 0: there are none.
        patience: the evaluations in a row without an improvement after which the run ends; 0: it goes on.
        least_improvement: the least by which a loss must be below the lowest one before, to be an improvement.
    """

    every: int = 0
    patience: int = 0
    least_improvement: float = 0.0

    def __post_init__(self) -> None:
        require(self, "every", 0 <= self.every <= _MAX_EVERY, "at least 1 step, or 0 (no evaluation)")
        require(self, "patience", 0 <= self.patience <= MAX_WINDOW, f"1 to {MAX_WINDOW}, or 0 (the run does not end)")
        require(self, "least_improvement", 0 <= self.least_improvement < inf, "a number of at least 0")
        if not self.every and (self.patience or self.least_improvement):
            raise ValueError("every is 0: expected at least 1 step with a patience or a least_improvement")
        if self.least_improvement and not self.patience:
            raise ValueError("patience is 0: expected at least 1 with a least_improvement")

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of one peer of a run. ``codec``, ``aggregation``, ``max_samples``, ``counting``, ``max_norm``,
    ``average_decay``, ``chunk_elements``, ``checkpoint_every``, ``rollback`` and ``evaluation`` must be the same for
    all peers of a run.

    A step needs a quorum of the peers that took the last step together. A peer that leaves, or whose process ends, does
    not count. If a peer is merely silent, no other peer knows whether it has ended or the network is divided. With a
    finite ``presume_gone_s`` a run goes on without silent peers after that time. Both parts of a network that stays
    divided for longer then go on, and the smaller part loses its steps when they meet again.

    With ``delay`` gradients are averaged while the next batch is computed. Let P[t] be the parameters with the first t
    averages applied. ``TrainingRun.step`` starts the averaging of batch t and returns. The average is applied at the
    first later call of ``step`` that finds it finished, never while the caller computes. Gradients of calls in between
    are taken at P[t] and belong to batch t + 1. If batch t + 1 has no others, updates are delayed by one step (the
    delayed parameter update of ZeRO-Offload: Ren et al., 2021): P[t+1] = P[t] - lr * g(P[t-1]) for SGD. No gradient is
    older: batch t + 1 is averaged after average t is applied. A peer waits for average t once it has as many samples of
    batch t + 1 as it gave to batch t. Peers stay bit-identical; each may choose ``delay`` for itself.

    With ``delay`` and local steps, a peer goes on from its own parameters while its earlier steps are averaged. When
    the average is applied, its parameters become the shared ones plus the steps that the average does not have.

    With ``counting`` "exact" the batch consists of ``target_batch_size`` named micro-batches, and peers report which of
    these are in their sums of gradients. Peers average only if their sets are disjoint and complete: the sum of all
    sums, divided by the number of micro-batches. If a peer fails before all have the result, there is no average.

    With ``checkpoint_every``, peers keep the states of the last steps that are multiples of that number. All peers go
    back to one of these checkpoints when the reported losses show that the run has diverged (``rollback``), or when a
    moderator orders it. A quorum decides this, as it decides an average. No batch is seen again afterwards.

    Raises:
        ValueError: a setting is out of its range.
    """

    host: str | None = None  # to listen on; None: the address on the route to the initial peers, or loopback
    port: int = 0  # of the service; 0: any free port
    dht_port: int = 0
    announce_host: str | None = None  # by which others reach this peer, if it is not ``host``
    client_mode: bool = False  # behind NAT: nobody can call this peer, so it calls others
    share: float = 1.0  # of the adding up, relative to other peers: in proportion to bandwidth; 0: none
    codec: str = "fp32"
    aggregation: str = "mean"  # or "centered_clip", which a minority of outlier gradients moves only a little
    max_samples: int = 0  # of one peer that count in a step, whatever it claims; 0: all
    counting: str = "samples"  # what a batch counts; or "exact", see above
    max_norm: float = 0.0  # to which averaged gradients are clipped, before the optimizer's step; 0: they are not
    average_decay: float = 0.0  # of the moving average of the weights, at each step; 0: there is no such average
    delay: bool = False  # average while the next batch is computed; see above
    chunk_elements: int = CHUNK_ELEMENTS
    join_timeout_s: float = 60.0
    restart_wait_s: float = 0.0  # that the founder of a run which has begun before waits for newer checkpoints
    gossip_s: float = 0.25  # between two exchanges of progress
    heartbeat_s: float = 1.0
    silence_s: float = 4.0  # after which a silent peer is no longer waited for
    presume_gone_s: float = inf  # after which a silent peer no longer counts for a quorum; see above
    straggler_s: float = 5.0  # the least deadline of a round; usually it is twice a round's duration
    max_meeting_s: float = 60.0  # the longest wait for a living peer that does not come
    checkpoint_every: int = 0  # steps; 0: no checkpoints, and no rollbacks
    checkpoints_kept: int = 2  # the number of newest checkpoints to keep
    checkpoint_directory: Path | None = None  # for this process's checkpoints; None: temporary
    lasting_directory: Path | None = None  # instead, of a run in stages: they stay there when the process ends
    rollback: RollbackPolicy = field(default_factory=RollbackPolicy)
    evaluation: EvaluationPolicy = field(default_factory=EvaluationPolicy)  # as `Evaluation` of TrainingRun says
    ledger: str | None = None  # a file for all contributions; None: the knowledge of other peers is enough

    @property
    def poll_s(self) -> float:
        """Return the seconds between two looks at whether a meeting can go on: a tenth of a heartbeat, or half of the
        least deadline if that is less, but at least 0.1."""
        return max(_LEAST_POLL_S, min(self.heartbeat_s / 10, self.straggler_s / 2))

    @property
    def common(self) -> dict[str, str]:
        """Return the settings that must be the same for all peers, as text."""
        settings: dict[str, object] = {
            "codec": self.codec,
            "aggregation": self.aggregation,
            "chunk_elements": self.chunk_elements,
            "checkpoint_every": self.checkpoint_every,
            "rollback": self.rollback if self.checkpoint_every else "off",
        }
        if self.counting != "samples":  # peers of older versions have no such setting
            settings["counting"] = self.counting
        if self.max_samples:
            settings["max_samples"] = self.max_samples
        if self.max_norm:
            settings["max_norm"] = self.max_norm
        if self.evaluation.every:
            settings["evaluation"] = self.evaluation
        if self.average_decay:
            settings["average_decay"] = self.average_decay
        return {name: str(value) for name, value in settings.items()}

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "gossip_s", "heartbeat_s", "silence_s", "straggler_s", "max_meeting_s"):
            require(self, name, 0 < getattr(self, name) < inf, "seconds, more than 0")
        if not 0 <= self.restart_wait_s < self.join_timeout_s:
            raise ValueError(
                f"restart_wait_s is {self.restart_wait_s}: expected seconds, from 0 to less than the join_timeout_s of "
                f"{self.join_timeout_s}, for which others wait"
            )
        require(self, "presume_gone_s", self.presume_gone_s > self.silence_s, f"more than silence_s, {self.silence_s}")
        self._check_averaging()
        check_max_norm(self.max_norm)
        check_average_decay(self.average_decay)
        require(self, "share", 0 <= self.share < inf, "a number of at least 0")
        require(self, "chunk_elements", 1 <= self.chunk_elements <= CHUNK_ELEMENTS, f"1 to {CHUNK_ELEMENTS}")
        if self.heartbeat_s * 2 > self.silence_s:
            raise ValueError(f"silence_s is {self.silence_s}: expected two heartbeats ({2 * self.heartbeat_s}) or more")
        require(self, "checkpoint_every", self.checkpoint_every >= 0, "at least 0 steps")
        if self.checkpoint_every:
            self._check_checkpoints_kept()

    def _check_averaging(self) -> None:
        require_one_of(self, "aggregation", AGGREGATIONS)
        require_one_of(self, "counting", COUNTINGS)
        check_max_samples(self.max_samples)
        if self.counting == "exact" and self.max_samples:
            raise ValueError("max_samples is set, and counting is 'exact': expected counting 'samples' with it")
        if self.counting == "exact" and (self.aggregation != "mean" or self.delay):
            raise ValueError("counting is 'exact': expected aggregation 'mean' with it, and no delay")
        if self.codec == "fp64" and self.counting != "exact":
            raise ValueError("codec is 'fp64': expected counting 'exact' with it, since samples are counted in fp32")

    def _check_checkpoints_kept(self) -> None:
        least = checkpoints_needed(self.checkpoint_every, self.rollback)
        if self.checkpoints_kept < least:
            raise ValueError(
                f"checkpoints_kept is {self.checkpoints_kept}: expected at least {least}, since the oldest must be "
                f"from before a loss that was too high for {self.rollback.patience} steps"
            )


def checkpoints_needed(every: int, policy: RollbackPolicy) -> int:
    """Return how many of the newest checkpoints, one per ``every`` steps, reach back to before the losses that were
    too high."""
    return 1 + -(-policy.patience // every)
