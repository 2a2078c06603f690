"""Devices by name: which one is the best here, and whether torch can compute on the one that was named."""

from __future__ import annotations

from typing import Any

import torch

from swarm_protocol.failures import first_line

ACCELERATORS = ("cuda", "xpu", "mps")  # the preferred ones first; torch calls AMD's GPUs cuda, too
_ERRORS = (RuntimeError, AssertionError, TypeError)  # AssertionError: torch was compiled without; TypeError: no float64


def available_devices() -> list[str]:
    """Return the kinds of devices that torch can use here, the best first, and ``cpu`` last."""
    backends: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    return [kind for kind in ACCELERATORS if backends[kind].is_available()] + ["cpu"]


def best_device(dtype: torch.dtype | None = None) -> str:
    """Return the best kind of device, or the best of those that can compute in ``dtype``."""
    return next(kind for kind in available_devices() if dtype is None or _refusal(torch.device(kind), dtype) is None)


def named_device(name: str | torch.device, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device of this name, such as ``cuda:1``.

    Raises:
        ValueError: torch does not know it or cannot use it here, or it cannot compute in ``dtype``.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown: expected cpu, {', '.join(ACCELERATORS)}, or cuda:1") from None
    found = available_devices()
    if device.type in ACCELERATORS and device.type not in found:
        raise ValueError(
            f"device {str(name)!r} cannot be used: torch {torch.__version__} finds no {device.type} here, but "
            + " and ".join(found)
        )
    try:
        torch.empty(0, device=device)
    except _ERRORS as error:
        raise ValueError(f"device {str(name)!r} cannot be used: {first_line(error)}") from None
    if (refusal := _refusal(device, dtype)) is not None:
        other = "float32" if dtype.itemsize < torch.float32.itemsize else "another device, such as cpu"
        shown = str(dtype).removeprefix("torch.")
        raise ValueError(f"device {str(name)!r} cannot compute in {shown} ({refusal}): choose {other}")
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which blocks are computed if nobody says otherwise."""
    return torch.bfloat16 if device.type in ("cuda", "xpu") else torch.float32


def _refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a product in ``dtype`` fails on the device; None if it does not."""
    if device.type == "cpu":
        return None
    try:
        ones = torch.ones(1, 1, dtype=dtype, device=device)
        (ones @ ones).cpu()
    except _ERRORS as error:
        return first_line(error)
    return None
