"""Half a day of a run in virtual time, in which it stops whole, has a bad batch, and its volunteers come and go."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.marks import SLOW
from tests.worlds.runs import simulate

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from simulated_week import DAY_S, Week, WeekPlan


@SLOW
def test_a_run_lasts_through_nights_stops_and_a_bad_batch(tmp_path: Path) -> None:
    plan = WeekPlan(volunteers=3, days=0.75, parameters=10**6, stops_h=(5.0, 13.0), bad_batch_h=10.0, round_h=1.0)
    result = simulate(Week(plan, tmp_path).live, 2 * DAY_S)
    assert result.final_states == 1 and not result.differing
    assert result.rollbacks == 3 and max(result.undone_steps) <= 5
    assert result.computing > 0.9
    assert result.lowest_loss < result.loss < 1.1 * result.single_loss
    assert result.seconds < result.single_s
