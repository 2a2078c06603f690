"""How much memory a peer of a stage needs, and what it may keep beyond that."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.wire.constants import MIB

PROCESS_BYTES = 512 * MIB  # of Python, torch and transformers before there is a model
_OPTIMIZERS = {"adamw": 8.0, "lamb": 8.0, "sgd": 0.0, "adamw8bit": 2.1, "lamb8bit": 2.1}  # states, bytes per parameter
_WEIGHT = 4  # of a parameter, and of its gradient: both are in fp32
_MOST_PENDING, _FEWEST_PENDING = 16, 4  # micro-batches, if nothing limits them
_MUCH_BYTES, _KEPT_BYTES, _REQUEST_BYTES = 512 * MIB, 512 * MIB, 1024 * MIB


@dataclass(frozen=True)
class StageNeeds:
    """What follows from the run file and the stage.

    Attributes:
        num_trained: parameters that are trained.
        other_bytes: of weights that are not trained, and of copies in bf16.
        optimizer: as the run file names it.
        sums: of gradients, ``fp32`` or ``fp64``.
        request_bytes: the least room for what trainers send, so that any micro-batch is taken.
        num_rooms: for requests; auditors have another one.
    """

    num_trained: int
    other_bytes: int
    optimizer: str
    sums: str
    request_bytes: int
    num_rooms: int = 1

    @property
    def resting_bytes(self) -> float:
        """Per parameter: weight, states of the optimizer, sum, and the result of the last average."""
        return _WEIGHT + _OPTIMIZERS[self.optimizer] + 2 * self._sum_bytes

    @property
    def stepping_bytes(self) -> float:
        """Per parameter: besides, what is averaged, the average, and the gradient that the optimizer is given."""
        return self.resting_bytes + 2 * self._sum_bytes + _WEIGHT

    @property
    def sending_bytes(self) -> float:
        """Per parameter: besides, the state that a peer who joins is given, and that is written twice in between."""
        return self.stepping_bytes + 2 * (_WEIGHT + _OPTIMIZERS[self.optimizer])

    @property
    def needed_bytes(self) -> int:
        """All that must be there, but what is computed with a micro-batch."""
        return PROCESS_BYTES + self.other_bytes + int(self.sending_bytes * self.num_trained)

    @property
    def gradient_bytes(self) -> int:
        return self.num_trained * _WEIGHT

    @property
    def _sum_bytes(self) -> int:
        return 8 if self.sums == "fp64" else 4


@dataclass(frozen=True)
class StageRoom:
    """In bytes.

    Attributes:
        pending: for gradients that wait for their commit.
        kept: for activations that wait for their backward pass.
        requests: for what trainers send, of each room.
    """

    pending: int
    kept: int
    requests: int


def room_of(needs: StageNeeds, memory_bytes: int | None) -> StageRoom:
    """Share out what is left of the memory of a process; None: as much as is of use.

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
            f"--memory is {_shown(memory_bytes)}: expected at least {_shown(least)} for a stage with "
            f"{needs.num_trained} parameters, which takes {needs.sending_bytes + _WEIGHT:g} bytes of each with "
            f"{needs.optimizer} and sums in {needs.sums}, and activations beside that; with more stages each has fewer"
        )
    pending = gradient * max(1, min(_MOST_PENDING, left // 2 // gradient))
    kept = min(_KEPT_BYTES, (left - pending) // 2)
    requests = min(_REQUEST_BYTES, (left - pending - kept) // needs.num_rooms) + needs.request_bytes
    return StageRoom(pending, kept, requests)


def _shown(size_bytes: int) -> str:
    return f"{-(-size_bytes // MIB)}MiB"
