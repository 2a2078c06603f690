"""The memory that a stage peer needs, and what it may keep beyond that."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_protocol.wire.constants import MIB
from swarm_training.core.config import NUM_REPLICAS
from swarm_training.runfile.memory import PROCESS_BYTES, STATE_BYTES, WEIGHT_BYTES, listed, mib, total
from swarm_training.runfile.settings import LocalSettings

_MOST_PENDING, _FEWEST_PENDING = 16, 2  # pending micro-batches; the fewest if no memory limit is given
_MUCH_BYTES = 384 * MIB  # of pending gradients without a memory limit, unless these are too few or too many
_KEPT_BYTES, _REQUEST_BYTES = 512 * MIB, 1024 * MIB  # the largest rooms for activations, and for requests


@dataclass(frozen=True)
class StageNeeds:
    """The memory needs that follow from the run file and the stage."""

    num_trained: int  # the number of trained parameters
    other_bytes: int  # the bytes of weights that are not trained, and of copies in bf16
    optimizer: str  # the name in the run file
    sums: str  # the dtype of gradient sums, ``fp32`` or ``fp64``
    request_bytes: int  # the least room for what trainers send, so that any micro-batch is taken
    num_rooms: int = 1  # the number of rooms for requests; auditors have another one
    is_averaged: bool = False  # whether the optimizer's state has the moving average of the weights
    # Whether another stage has some of the parameters, so that a sum of both averages is needed.
    is_shared: bool = False
    local: LocalSettings = field(default_factory=LocalSettings)  # the settings of local steps
    keeps_errors: bool = False  # whether what the codec loses is kept for the next average

    @property
    def resting_bytes(self) -> float:
        """Return the bytes per parameter at rest: weight, optimizer states, sum, and the last average's result. With
        local steps, also the shared weight and the states of the inner optimizer."""
        inner = WEIGHT_BYTES + STATE_BYTES[self.optimizer] if self.local.batch_size else 0
        return self._state_bytes + 2 * self._sum_bytes + inner + self._error_bytes

    @property
    def stepping_bytes(self) -> float:
        """Return the bytes per parameter in a step: also the average, and what is averaged, or after that the
        optimizer's gradient. To give the state to a peer who joins takes no more."""
        return self.resting_bytes + 2 * self._sum_bytes + (WEIGHT_BYTES if self.is_shared else 0)

    @property
    def needed_bytes(self) -> int:
        """Return all bytes that the peer needs, except those to compute a micro-batch."""
        return PROCESS_BYTES + self.other_bytes + int(self.stepping_bytes * self.num_trained)

    @property
    def gradient_bytes(self) -> int:
        return self.num_trained * WEIGHT_BYTES

    @property
    def _state_bytes(self) -> float:
        return WEIGHT_BYTES + self._stepping_state_bytes + (WEIGHT_BYTES if self.is_averaged else 0)

    @property
    def _stepping_state_bytes(self) -> float:
        """Return the bytes per parameter of the states of the optimizer that steps with averages."""
        if self.local.batch_size:
            return WEIGHT_BYTES if self.local.outer_momentum else 0
        return STATE_BYTES[self.optimizer]

    @property
    def _error_bytes(self) -> int:
        """Return the bytes per parameter of the errors of parts and means, also for the average that has not ended."""
        return 4 * WEIGHT_BYTES if self.keeps_errors else 0

    @property
    def _sum_bytes(self) -> int:
        return 8 if self.sums == "fp64" else 4

    def described(self, room: StageRoom, num_checkpoints: int) -> str:
        """Return what the peer holds in memory and on disk, as a part of a sentence. ``num_checkpoints``: those of its
        stage at most."""
        trained, is_local = self.num_trained, bool(self.local.batch_size)
        parts = {
            "weights": WEIGHT_BYTES * trained + self.other_bytes,
            "optimizer": int(STATE_BYTES[self.optimizer] * trained),
            "the weights that all share": WEIGHT_BYTES * trained if is_local else 0,
            "the outer optimizer": int(self._stepping_state_bytes * trained) if is_local else 0,
            "average of the weights": WEIGHT_BYTES * trained if self.is_averaged else 0,
            "gradients": self._sum_bytes * trained,
            "errors of encoding": self._error_bytes * trained,
            "last result": self._sum_bytes * trained,
            "pending gradients": room.pending,
            "activations": room.kept,
            "requests": self.num_rooms * room.requests,
            "while it steps": int((self.stepping_bytes - self.resting_bytes) * trained),
        }
        checkpoint = mib(int(self._state_bytes * trained))
        return (
            f"up to {mib(total(parts))}: {listed(parts)}; on disk up to "
            f"{num_checkpoints} checkpoints of {checkpoint} each, and {NUM_REPLICAS} of the stage before"
        )


@dataclass(frozen=True)
class StageRoom:
    """The room of a stage peer, in bytes."""

    pending: int  # the room for gradients that wait for their commit
    kept: int  # the room for activations that wait for their backward pass
    requests: int  # the room for what trainers send, in each room for requests


def room_of(needs: StageNeeds, memory_bytes: int | None) -> StageRoom:
    """Divide the memory that the stage's needs leave into rooms. ``memory_bytes``: that of the process; None: each
    room is as large as is useful.

    Raises ValueError if the stage does not fit.
    """
    gradient = needs.gradient_bytes
    if memory_bytes is None:
        most = min(_MOST_PENDING, max(_FEWEST_PENDING, _MUCH_BYTES // gradient))
        return StageRoom(most * gradient, _KEPT_BYTES, max(needs.request_bytes, _REQUEST_BYTES))
    least_requests = needs.num_rooms * needs.request_bytes
    least = needs.needed_bytes + gradient + least_requests
    left = memory_bytes - needs.needed_bytes - least_requests
    if left < gradient:
        raise ValueError(
            f"--memory is {mib(memory_bytes)}: expected at least {mib(least)} for a stage with "
            f"{needs.num_trained} parameters, each of which takes {needs.stepping_bytes + WEIGHT_BYTES:g} bytes with "
            f"{needs.optimizer} and sums in {needs.sums}, and room for activations; with more stages, each has fewer"
        )
    # One gradient always fits, as checked: without it, the peer could take no micro-batch.
    pending = gradient * max(1, min(_MOST_PENDING, left // 2 // gradient))
    kept = min(_KEPT_BYTES, (left - pending) // 2)
    requests = min(_REQUEST_BYTES, (left - pending - kept) // needs.num_rooms) + needs.request_bytes
    return StageRoom(pending, kept, requests)
