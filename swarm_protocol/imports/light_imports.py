"""A faster import of transformers, in half the time and with 115 to 140 MB less, to compute blocks or text only.

Where they are installed, transformers imports SciPy and other packages for features that such a process never uses. It
imports torch's distributed tensors for models larger than one process, and torch's compiler to mark a few functions.
All of these stay importable, but transformers does without them. If a later transformers stops importing one of them,
nothing is left out for it.

Two parts of torch itself are deferred until they are needed. Its Python operations on the meta device cost 18 MB and
0.35 s. Packages that it imports for possible use cost 8 MB, 0.1 s and 200 modules.
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
# Optional packages of transformers: it checks once whether each is installed.
LEFT_OUT = ("scipy", "sklearn", "PIL", "torchvision", "jinja2", "accelerate")
NEEDED_FOR_TEXT = ("jinja2", "accelerate")  # for chat templates, and for drafts with quantised weights
MODULES = ("transformers.modeling_utils", "transformers.generation.utils")  # the modules that check for them
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
ALONE = {"torch.export": None}  # packages whose modules are imported without the package's own code


def _mark(function: Callable[..., Any] | None = None, *_arguments: Any, **_options: Any) -> Any:
    """Return the function unchanged: a decorator that works with or without arguments."""
    return _mark if function is None else function


def _enter_torch() -> None:
    """Defer torch's meta operations; of the modules that they import, load the one that generators need."""
    if "torch" in sys.modules:
        return
    for name in (META_OPERATIONS, *FOR_OTHERS):
        put_off(name, alone=ALONE.get(name, ()))
    import torch

    # torch/_prims/rng_prims.py, which is deferred with the meta operations, would do this for generators.
    with suppress(ImportError, KeyError):  # another version of torch
        from torch._opaque_base import OpaqueBaseMeta

        vars(torch._C)["_set_generator_metaclass"](OpaqueBaseMeta)
    try:
        torch.Generator()
    except RuntimeError:  # a version that needs more of what is deferred
        run(META_OPERATIONS)


def _enter_compiler() -> None:
    """Defer torch's compiler until something is compiled."""
    import torch  # noqa: F401  (whose module is entered)

    marks = dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _mark)
    enter("torch._dynamo", marks, after=META_OPERATIONS, alone=["_trace_wrapped_higher_order_op"])


@contextmanager
def collected_later() -> Iterator[None]:
    """Disable the garbage collector in the context, and exempt all objects created there from later collections.

    Imports create hundreds of thousands of objects that live as long as the process. Scanning them repeatedly takes
    a sixth of the import time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_for_text() -> None:
    """Call ``import_transformers`` for a command that writes text; call this before anything imports torch."""
    with collected_later():
        import_transformers([name for name in LEFT_OUT if name not in NEEDED_FOR_TEXT])


def import_transformers(left_out: Sequence[str] = LEFT_OUT) -> None:
    """Import transformers without the packages in ``left_out``; do nothing if it is imported already.

    Call this before anything else imports a part of transformers.
    """
    if "transformers" in sys.modules:
        return
    remember_models()
    _enter_torch()
    _enter_compiler()
    try:
        with _without(left_out):
            _find_no_distributed_torch()
            for name in MODULES:
                importlib.import_module(name)
    except (ImportError, AttributeError, NameError) as error:  # a version that cannot do without them
        _logger.debug("transformers is imported with all that it asks for: %s", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


@contextmanager
def _without(packages: Sequence[str]) -> Iterator[None]:
    """Block the import of these packages while the context is active (``sys.modules[name] = None``)."""
    blocked = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


def _find_no_distributed_torch() -> None:
    """Make transformers believe that this torch was built without support for several processes."""
    import torch
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # which caches what it finds now
    finally:
        torch.distributed.is_available = is_available
