"""The settings of one peer of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

WIRE_VERSION = 1
MAX_MEMBERS = 128  # of a group; its leader tells each of all, 16 MB at once, while they wait for ``silence_s``
AGGREGATIONS = ("mean", "centered_clip")
COUNTINGS = ("samples", "exact")
CHUNK_ELEMENTS = 1 << 18  # of a vector, in one message: 1 MiB in fp32
MAX_WINDOW = 4096  # losses; a joiner is given all of them in one message


@dataclass(frozen=True)
class RollbackPolicy:
    """When the losses of a run say that it has diverged. Raises ValueError if a field is out of its range.

    Attributes:
        margin: a loss is too high above the running median plus this.
        patience: so many steps in a row of it cause a rollback; a loss that is not finite does at once.
        window: losses of which the median is taken; those that are too high are not among them.
        warmup: before so many losses were seen, none is too high.
    """

    margin: float = 1.0
    patience: int = 10
    window: int = 100
    warmup: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.margin <= inf:
            raise ValueError(f"margin is {self.margin}: expected a number above 0")
        for name in ("patience", "window", "warmup"):
            if not 1 <= getattr(self, name) <= MAX_WINDOW:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 1 to {MAX_WINDOW}")
        if self.warmup > self.window:
            raise ValueError(f"warmup is {self.warmup}: expected at most the window, which is {self.window}")


@dataclass(frozen=True)
class TrainingConfig:
    """How a peer takes part. ``codec``, ``aggregation``, ``counting``, ``chunk_elements``, ``checkpoint_every`` and
    ``rollback`` must be the same for all peers of a run.

    A step needs a quorum of those who took the last one together. Who leaves, or whose process ends, does not count; of
    who is merely silent nobody can say whether it has ended or the network is cut in two. With a finite
    ``presume_gone_s`` a run goes on without those after that time, and both parts of a network that is cut for longer
    do: the smaller one loses its steps when they meet again.

    With ``delay`` gradients are averaged while the next batch is computed. Let P[t] be the parameters with the first t
    averages applied. ``TrainingRun.step`` starts the averaging of batch t and returns; the average is applied at the
    first later call of ``step`` that finds it there, never while the caller computes. Gradients of calls in between are
    taken at P[t] and belong to batch t + 1. Where they are all of it, updates are delayed by one step (the delayed
    parameter update of ZeRO-Offload: Ren et al., 2021): P[t+1] = P[t] - lr * g(P[t-1]) for SGD. No gradient is older
    than that: batch t + 1 is averaged after average t is applied, and a peer that has as many samples of it as it gave
    to batch t waits for average t. Peers stay equal bit for bit; each may choose ``delay`` for itself.

    With ``counting`` "exact" the batch is made of named micro-batches, ``target_batch_size`` of them, and peers report
    which of them are in their sums of gradients. Only peers whose sets are disjoint and complete average: the sum of
    all sums, divided by the number of micro-batches. If one of them fails before all have the result, there is none.

    With ``checkpoint_every``, peers keep the states of the last steps that are multiples of it, and all go back to one
    of them when the losses that they report say that the run has diverged (``rollback``), or when a moderator orders
    it. It is decided as an average is: by a quorum. No batch is seen again afterwards.

    Raises:
        ValueError: a setting is out of its range.
    """

    host: str | None = None  # to listen on; None: the address that leads to the initial peers, loopback without any
    port: int = 0  # of the service; 0: any that is free
    dht_port: int = 0
    announce_host: str | None = None  # under which others reach this peer, where it is not ``host``
    client_mode: bool = False  # behind NAT: nobody can call this peer, so it calls others
    share: float = 1.0  # of the work of adding up, relative to others: in proportion to bandwidth; 0: none
    codec: str = "fp32"
    aggregation: str = "mean"  # or "centered_clip", which a minority of gradients that are far off moves little
    counting: str = "samples"  # of a batch; or "exact", see above
    delay: bool = False  # average while the next batch is computed; see above
    chunk_elements: int = CHUNK_ELEMENTS
    join_timeout_s: float = 60.0
    gossip_s: float = 0.25  # between two exchanges of progress
    heartbeat_s: float = 1.0
    silence_s: float = 4.0  # after which a peer is no longer waited for
    presume_gone_s: float = inf  # after which a peer that is silent no longer counts for a quorum; see below
    straggler_s: float = 5.0  # the least deadline of a round; usually twice as long as a round takes
    max_meeting_s: float = 60.0  # that the others wait for one that is alive and does not come
    checkpoint_every: int = 0  # steps; 0: there are none, and no rollbacks
    checkpoints_kept: int = 2  # the last so many
    checkpoint_directory: Path | None = None  # for those that this process keeps; None: in memory
    rollback: RollbackPolicy = field(default_factory=RollbackPolicy)
    ledger: str | None = None  # a file that keeps who has contributed how much; None: what other peers know is enough

    @property
    def common(self) -> dict[str, str]:
        """What must be the same for all peers, as text."""
        settings: dict[str, object] = {
            "codec": self.codec,
            "aggregation": self.aggregation,
            "chunk_elements": self.chunk_elements,
            "checkpoint_every": self.checkpoint_every,
            "rollback": self.rollback if self.checkpoint_every else "off",
        }
        if self.counting != "samples":  # peers of older versions have no such setting
            settings["counting"] = self.counting
        return {name: str(value) for name, value in settings.items()}

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "gossip_s", "heartbeat_s", "silence_s", "straggler_s", "max_meeting_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: expected seconds, more than 0")
        if not self.presume_gone_s > self.silence_s:
            raise ValueError(f"presume_gone_s is {self.presume_gone_s}: expected more than silence_s, {self.silence_s}")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {self.aggregation!r}: expected one of {', '.join(AGGREGATIONS)}")
        if self.counting not in COUNTINGS:
            raise ValueError(f"counting is {self.counting!r}: expected one of {', '.join(COUNTINGS)}")
        if self.counting == "exact" and (self.aggregation != "mean" or self.delay):
            raise ValueError("counting is 'exact': expected aggregation 'mean' with it, and no delay")
        if self.codec == "fp64" and self.counting != "exact":
            raise ValueError("codec is 'fp64': expected counting 'exact' with it, since samples are counted in fp32")
        if not 0 <= self.share < inf:
            raise ValueError(f"share is {self.share}: expected a number of at least 0")
        if not 1 <= self.chunk_elements <= CHUNK_ELEMENTS:
            raise ValueError(f"chunk_elements is {self.chunk_elements}: expected 1 to {CHUNK_ELEMENTS}")
        if self.heartbeat_s * 2 > self.silence_s:
            raise ValueError(f"silence_s is {self.silence_s}: expected two heartbeats ({2 * self.heartbeat_s}) or more")
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every}: expected at least 0 steps")
        if not self.checkpoint_every:
            return
        least = checkpoints_needed(self.checkpoint_every, self.rollback)
        if self.checkpoints_kept < least:
            raise ValueError(
                f"checkpoints_kept is {self.checkpoints_kept}: expected at least {least}, since the oldest must be "
                f"from before a loss that was too high for {self.rollback.patience} steps"
            )


def checkpoints_needed(every: int, policy: RollbackPolicy) -> int:
    """So many of the last checkpoints, one every so many steps, reach back to before a row of losses that are too
    high."""
    return 1 + -(-policy.patience // every)
