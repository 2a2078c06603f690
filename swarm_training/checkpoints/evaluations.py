"""``evaluations.json`` beside the checkpoints of a run: the losses on held-out data, and the best checkpoint's name."""

from __future__ import annotations

import json
from math import inf, isfinite
from pathlib import Path
from typing import Any

from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object
from swarm_protocol.untrusted.numbers import Expected, require_number
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss
from swarm_training.evaluation.policy import MAX_LOSSES, EvaluationHistory

EVALUATIONS = "evaluations.json"
_COUNT = Expected(0, 1 << 53, whole=True)
_ROLLBACKS = Expected(0, (1 << 32) - 1, whole=True)
_LOSS = Expected(-1e300, 1e300)


def write_evaluations(directory: Path, run: str, history: EvaluationHistory, best_checkpoint: str | None) -> None:
    """Write the losses. ``best_checkpoint``: the name of the checkpoint with the lowest loss; None: the directory does
    not have it. Raise ValueError if the directory cannot be written."""
    losses = [
        {"step": each.step, "rollbacks": each.moment.rollbacks, "loss": _finite(each.loss), "samples": each.samples}
        for each in history.losses
    ]
    best = history.best
    shown = None if best is None else {"step": best.step, "loss": best.loss, "checkpoint": best_checkpoint}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with written_atomically(directory / EVALUATIONS) as partial:
            partial.write_text(json.dumps({"run": run, "best": shown, "losses": losses}, indent=1))
    except OSError as error:
        raise ValueError(f"cannot write {directory / EVALUATIONS}: {error.strerror}") from None


def read_evaluations(directory: Path, run: str) -> EvaluationHistory:
    """Return the losses in the directory; none if it has no such file, or one of another run. Raise CheckpointError if
    the file is damaged."""
    path = directory / EVALUATIONS
    if not path.exists():
        return EvaluationHistory()
    facts = read_object(path)
    losses = facts.get("losses")
    if facts.get("run") != run:
        return EvaluationHistory()
    if not isinstance(losses, list) or len(losses) > MAX_LOSSES or not all(isinstance(each, dict) for each in losses):
        raise CheckpointError(f"{path} has no list of losses: expected one of at most {MAX_LOSSES}")
    return EvaluationHistory.of(_loss(each, path) for each in losses)


def _loss(facts: dict[str, Any], path: Path) -> HeldOutLoss:
    for name, expected in (("step", _COUNT), ("rollbacks", _ROLLBACKS), ("samples", _COUNT)):
        require_number(facts.get(name), expected, path, name)
    if facts.get("loss") is not None:
        require_number(facts["loss"], _LOSS, path, "loss")
    loss = inf if facts.get("loss") is None else float(facts["loss"])
    return HeldOutLoss(Moment(facts["rollbacks"], facts["step"]), loss, facts["samples"])


def _finite(loss: float) -> float | None:
    return loss if isfinite(loss) else None
