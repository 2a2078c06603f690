"""Accelerators that are not there: tensors that say where they are, and are computed by the CPU.

Values are real, so that results can be compared. Whoever mixes devices gets the error that an accelerator would give,
as does whoever hands NumPy what is not on the CPU. Of the kernels themselves nothing is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

# Tensors of type "meta" need no driver, autograd takes them, and a number tells them apart.
FIRST, SECOND = torch.device("meta", 0), torch.device("meta", 1)
_BETWEEN_DEVICES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class SimulatedTensor(torch.Tensor):
    """``held``: the values, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> SimulatedTensor:
        with torch.inference_mode(False):  # whose tensors cannot be views of others
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=device,
            )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        with SimulatedDevices():
            return function(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"{self.device}: {self.held!r}"


class SimulatedDevices(TorchDispatchMode):
    """While this lasts, tensors can be made on FIRST and SECOND, or be moved there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's wrapper for it would take longer than the functions."""
        return False

    def __enter__(self):
        self._before = [*getattr(self, "_before", ()), torch._C._only_lift_cpu_tensors()]
        torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor(…, device=FIRST) would not come here
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(self._before.pop())

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        if _decomposes(function):  # as happens in inference mode
            with self:
                return function.decompose(*args, **(kwargs or {}))
        return _computed(function, args, kwargs or {})


@cache
def _decomposes(function: Any) -> bool:
    return function._can_decompose()


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a function, of which some are lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the value with each of its tensors changed. torch's own trees take several times as long."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    return value


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, SimulatedTensor) else tensor


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
    device = kwargs.get("device") or _device_of(function, tensors)
    if device.index is None and not any(isinstance(tensor, SimulatedTensor) for tensor in tensors):
        return function(*args, **kwargs)  # also where transformers makes models without values
    held_args = _mapped(_held, args)
    held_kwargs = {name: _mapped(_held, value) for name, value in kwargs.items()}
    if "device" in held_kwargs:
        held_kwargs["device"] = torch.device("cpu")
    if function is torch.ops.aten.histc.default:  # accelerators have it for integers too
        held_args = (held_args[0].float(), *held_args[1:])
    outputs = function(*held_args, **held_kwargs)
    if device.type == "cpu":
        return outputs
    outputs = _mapped(lambda tensor: SimulatedTensor(tensor, device), outputs)
    # Without, ``x += 1`` would name another tensor than x from then on.
    return return_and_correct_aliasing(function, args, kwargs, outputs) if tensors else outputs


def _device_of(function: Any, tensors: list[torch.Tensor]) -> torch.device:
    """Of the results. Numbers of the CPU, tensors without dimensions, go with tensors of any device."""
    if function in _BETWEEN_DEVICES:
        return tensors[0].device
    devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise RuntimeError(f"{function}: expected tensors on one device, found {' and '.join(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")
