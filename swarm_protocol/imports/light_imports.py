"""Imports transformers for a process that computes blocks, or writes text, and nothing else: in half the time, and
115 to 140 MB less.

Wherever they are installed, transformers imports SciPy and others for what such a process never does, torch's
distributed tensors for models that one process does not hold, and torch's compiler to mark a few functions for it. All
of them stay importable; only transformers does without. What a later transformers no longer asks for is simply not left
out.

Of torch itself, operations on the meta device that it has in Python wait until one is needed: 18 MB and 0.35 s. So do
packages that it imports for whoever may ask for them: 8 MB, 0.1 s and 200 modules.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from swarm_protocol.imports.late_modules import enter, put_off, run
from swarm_protocol.imports.model_index import remember_models

_logger = logging.getLogger(__name__)
# Optional packages of transformers: it asks once for each whether it is there.
LEFT_OUT = ("scipy", "sklearn", "PIL", "torchvision", "jinja2", "accelerate")
NEEDED_FOR_TEXT = ("jinja2", "accelerate")  # for chat templates, and drafts whose weights are quantized
MODULES = ("transformers.modeling_utils", "transformers.generation.utils")  # those that ask
META_OPERATIONS = "torch._meta_registrations"
FOR_OTHERS = (
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)
ALONE = {"torch.export": None}  # packages whose modules are imported, and do without the package


def _mark(function: Callable[..., Any] | None = None, *_arguments: Any, **_options: Any) -> Any:
    """A decorator, with arguments or without, that leaves the function as it is."""
    return _mark if function is None else function


def _enter_torch() -> None:
    """Its operations on the meta device wait; among the modules that they import one makes generators usable."""
    if "torch" in sys.modules:
        return
    for name in (META_OPERATIONS, *FOR_OTHERS):
        put_off(name, alone=ALONE.get(name, ()))
    import torch

    with suppress(ImportError, KeyError):  # another version
        from torch._opaque_base import OpaqueBaseMeta

        vars(torch._C)["_set_generator_metaclass"](OpaqueBaseMeta)
    try:
        torch.Generator()
    except RuntimeError:
        run(META_OPERATIONS)


def _enter_compiler() -> None:
    """torch's compiler waits until somebody compiles something."""
    import torch  # noqa: F401  (whose module is entered)

    marks = dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _mark)
    enter("torch._dynamo", marks, after=META_OPERATIONS, alone=["_trace_wrapped_higher_order_op"])


@contextmanager
def collected_later() -> Iterator[None]:
    """Meanwhile the collector does not run; afterwards it never looks at what has been made, which stays.

    Imports make hundreds of thousands of objects that live as long as the process. Looking through them again and again
    takes a sixth of the time of importing them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_for_text() -> None:
    """``import_transformers`` for a command that writes text; to be called before anything imports torch."""
    with collected_later():
        import_transformers([name for name in LEFT_OUT if name not in NEEDED_FOR_TEXT])


def import_transformers(left_out: Sequence[str] = LEFT_OUT) -> None:
    """To be called before anything else of transformers is imported; does nothing if it has been.

    ``left_out``: packages that transformers does without.
    """
    if "transformers" in sys.modules:
        return
    remember_models()
    _enter_torch()
    _enter_compiler()
    try:
        with _without(left_out), _one_process():
            for name in MODULES:
                importlib.import_module(name)
    except (ImportError, AttributeError, NameError) as error:  # a version that cannot do without
        _logger.debug("transformers is imported with all that it asks for: %s", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


@contextmanager
def _without(packages: Sequence[str]) -> Iterator[None]:
    """Meanwhile they cannot be imported, by the means that Python has for it."""
    blocked = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


@contextmanager
def _one_process() -> Iterator[None]:
    """transformers is told that this torch, like some, was built without support for several processes."""
    import torch
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # it remembers what it found
    finally:
        torch.distributed.is_available = is_available
    yield
