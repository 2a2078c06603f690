"""What is measured while a simulated swarm runs, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from statistics import median


@dataclass
class Gap:
    """A time when some block had no server that is ONLINE.

    Attributes:
        coverable: whether the servers that were there could have held all blocks, throughout.
        by_move: whether a server that moved opened it.
    """

    since: float
    until: float = inf
    coverable: bool = True
    by_move: bool = False


@dataclass
class Metrics:
    """What happened under one policy. The lists have one number per sample, the first ``num_measured`` under churn.

    Attributes:
        carried: tokens per second that clients can get.
        optimum: no spans of the servers that are there (``is_there``) carry more.
        lowest_block, mean_block: the servers' speeds through their whole spans, summed per block, as Petals measures.
    """

    times: list[float] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)
    optimum: list[float] = field(default_factory=list)
    lowest_block: list[float] = field(default_factory=list)
    mean_block: list[float] = field(default_factory=list)
    num_measured: int = 0
    gaps: list[Gap] = field(default_factory=list)
    server_hours: float = 0.0
    moves: int = 0
    server_hours_at_rest: float = 0.0
    moves_at_rest: int = 0

    @property
    def of_optimum(self) -> float:
        """Mean over the time with churn, divided by the mean over the same time."""
        return sum(self.carried[: self.num_measured]) / sum(self.optimum[: self.num_measured])

    @property
    def of_mean_block(self) -> float:
        return sum(self.lowest_block[: self.num_measured]) / sum(self.mean_block[: self.num_measured])

    def heal_s(self, coverable: bool = True) -> list[float]:
        return [gap.until - gap.since for gap in self.gaps if gap.coverable == coverable]

    @property
    def moves_per_hour(self) -> float:
        return self.moves / self.server_hours

    @property
    def moves_per_hour_at_rest(self) -> float:
        return self.moves_at_rest / self.server_hours_at_rest

    def summary(self) -> dict[str, float | None]:
        healed = self.heal_s()
        return {
            "of_optimum": self.of_optimum,
            "lowest_block_of_mean": self.of_mean_block,
            "gaps": len(healed),
            "heal_median_s": median(healed) if healed else None,
            "heal_max_s": max(healed, default=None),
            "gaps_opened_by_moves": sum(gap.by_move for gap in self.gaps),
            "gaps_not_coverable": len(self.heal_s(coverable=False)),
            "moves_per_server_hour": self.moves_per_hour,
            "moves_per_server_hour_at_rest": self.moves_per_hour_at_rest,
        }
