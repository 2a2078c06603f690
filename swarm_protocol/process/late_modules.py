"""Modules that are importable before their code has run, which it does once somebody asks for one of their names.

A package lets its modules be imported without its own ``__init__``.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_RUNNING = threading.RLock()
_WAIT_S = 10.0  # for another thread that runs it; no longer, since it may wait for a module that this one imports


class _LateModule(ModuleType):
    """A module whose code has not run yet, or is running: then it has no ``_stand_ins`` any more."""

    def __getattr__(self, name: str) -> Any:
        stand_ins = vars(self).get("_stand_ins", {})
        if name in stand_ins:
            return stand_ins[name]
        being_imported = f"{self.__name__}.{name}" in sys.modules
        if being_imported or (name.startswith("__") and name != "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        locked = _RUNNING.acquire(timeout=_WAIT_S)
        try:
            if vars(self).pop("_stand_ins", None) is not None:
                self._run()
            return ModuleType.__getattribute__(self, name)
        finally:
            if locked:
                _RUNNING.release()

    def _run(self) -> None:
        assert self.__spec__ is not None and self.__spec__.loader is not None
        try:
            self.__spec__.loader.exec_module(self)
        finally:
            self.__class__ = ModuleType  # type: ignore[assignment]


def enter(name: str, stand_ins: Mapping[str, Any] | None = None) -> None:
    """Puts off the code of a module; does nothing if it has run, or there is no such module.

    ``stand_ins`` are functions and classes that do instead of the module's own until its code has run. Who has got one
    by then keeps it.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _LateModule
    vars(module)["_stand_ins"] = dict(stand_ins or {})
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def has_run(name: str) -> bool:
    """Whether the module is there with all it has, and not only entered."""
    return name in sys.modules and "_stand_ins" not in vars(sys.modules[name])
