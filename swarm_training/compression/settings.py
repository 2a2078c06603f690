"""The settings of averaging in a run file, which are the same at all peers of the run."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_training.core.checks import require, require_one_of
from swarm_training.core.config import AGGREGATIONS, check_max_samples

CODECS = ("fp32", "fp16", "int8", "int4", "2bit")  # fp64 is for micro-batches that are counted exactly
_MAX_RANK = 1 << 16
_LONGEST_S = 86400.0


@dataclass(frozen=True)
class AveragingSettings:
    """A run's settings for averaging."""

    codec: str = "fp32"
    error_feedback: bool = False  # whether the codec's loss is added to the next gradient
    power_sgd_rank: int = 0  # the rank of the two factors that replace a matrix; 0 sends matrices as they are
    # The way to combine gradients; a minority of cheaters moves ``centered_clip`` only a little.
    aggregation: str = "mean"
    max_samples: int = 0  # the most samples of one peer that count in a step, whatever the peer claims; 0: all of them
    # The time, in seconds, for which peers wait for a slow one before they average without it; 0: 5 seconds, or 600
    # with local steps. A round that usually takes longer has twice that time.
    straggler_s: float = 0.0
    delay: bool = False  # whether the next batch is computed while gradients travel, see ``TrainingConfig``

    def __post_init__(self) -> None:
        require_one_of(self, "codec", CODECS)
        if self.error_feedback and self.codec == "fp32":
            raise ValueError("error_feedback is true: expected a codec other than fp32 with it, which loses nothing")
        if self.codec == "2bit" and not self.error_feedback:
            raise ValueError("codec is '2bit': expected error_feedback = true with it, since it loses most of a vector")
        require_one_of(self, "aggregation", AGGREGATIONS)
        check_max_samples(self.max_samples)
        if self.aggregation != "mean" and self.power_sgd_rank:
            raise ValueError(
                f"power_sgd_rank is {self.power_sgd_rank}: expected 0 with aggregation {self.aggregation!r}"
            )
        require(self, "power_sgd_rank", not self.delay or not self.power_sgd_rank, "0 with a delay")
        if not 0 <= self.straggler_s <= _LONGEST_S:
            raise ValueError(
                f"straggler_s is {self.straggler_s}: expected seconds, 0 (the default) to {_LONGEST_S:.0f}"
            )
        require(self, "power_sgd_rank", 0 <= self.power_sgd_rank <= _MAX_RANK, f"0 (off) to {_MAX_RANK}")
