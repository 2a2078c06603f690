"""The memory of a process that trains: the parts that follow from the run file, as a limit and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from swarm_protocol.wire.constants import MIB
from swarm_training.runfile.settings import RunFile

PROCESS_BYTES = 512 * MIB  # what Python, torch and transformers take before there is a model
WEIGHT_BYTES = 4  # of a parameter, and of its gradient: both are in fp32
# The optimizer's states, in bytes per parameter. Muon keeps half of that for matrices.
STATE_BYTES = {"adamw": 8.0, "lamb": 8.0, "sgd": 0.0, "adamw8bit": 2.1, "lamb8bit": 2.1, "muon": 8.0}


def volunteer_parts(file: RunFile, model: nn.Module) -> dict[str, int]:
    """Return the bytes of each part of a peer with the whole model, except the activations of a batch."""
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    other = sum(each.nbytes for each in (*frozen, *model.buffers()))
    vector = WEIGHT_BYTES * trained
    averaging, local = file.averaging, file.local
    # Error feedback keeps the errors of parts and of means, and as much for the average that has not ended yet.
    errors = 4 if averaging.error_feedback else 2 if averaging.power_sgd_rank else 0
    return {
        "weights": vector + other,
        "optimizer": int(STATE_BYTES[file.optimizer.name] * trained),
        "average of the weights": vector if file.optimizer.average_decay else 0,
        "gradients": vector,
        "the weights that all share": vector if local.batch_size else 0,
        "the outer optimizer": vector if local.batch_size and local.outer_momentum else 0,
        "sum of gradients": vector,
        "errors of encoding": errors * vector,
        "last result": vector,
        "while it averages": (3 if averaging.delay else 2) * vector,
        "weights of an evaluation": vector if file.evaluation.every else 0,
    }


def total(parts: Mapping[str, int]) -> int:
    """Return all bytes of a process that holds these parts."""
    return PROCESS_BYTES + sum(parts.values())


def listed(parts: Mapping[str, int]) -> str:
    """Return how much memory each part of a process takes, as a part of a sentence."""
    shown = ", ".join(f"{name} {mib(size_bytes)}" for name, size_bytes in parts.items() if size_bytes)
    return f"{shown}, the process itself {mib(PROCESS_BYTES)}"


def room_for_activations(parts: Mapping[str, int], memory_bytes: int) -> int:
    """Return the bytes that are left for the activations of a batch.

    Raises ValueError if the parts do not fit, with a sentence that lists them.
    """
    left = memory_bytes - total(parts)
    if left <= 0:
        raise ValueError(
            f"--memory is {mib(memory_bytes)}: expected more than {mib(total(parts))}, for {listed(parts)}, and "
            "activations beside that; adamw8bit takes less than adamw, and stages divide a model among peers"
        )
    return left


def mib(size_bytes: int) -> str:
    """Return a size in MiB, rounded up."""
    return f"{-(-size_bytes // MIB)}MiB"
