"""Modules that are importable before their code has run; the code runs at the first access to a missing name.

As usual in Python, a package's code runs before its modules' code, except for modules listed in ``alone``.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Execute = Callable[[ModuleType, Loader], None]
_RUNNING = threading.RLock()
_WAIT_S = 10.0  # for another thread that runs the code; a longer wait could be a deadlock over a module imported here


class _LateModule(ModuleType):
    """A module whose code has not run yet, or is running; while it runs, ``_stand_ins`` is absent."""

    def __getattr__(self, name: str) -> Any:
        stand_ins = vars(self).get("_stand_ins", {})
        if name in stand_ins:
            return stand_ins[name]
        # Python finds a submodule in ``sys.modules`` while its package lacks the attribute, and asks packages for names
        # such as ``__path__`` itself. Neither needs the code.
        being_imported = f"{self.__name__}.{name}" in sys.modules
        if being_imported or (name.startswith("__") and name != "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        locked = _RUNNING.acquire(timeout=_WAIT_S)
        try:
            # Removed before the code runs, so that the code itself does not get here again.
            if vars(self).pop("_stand_ins", None) is not None:
                self._run()
            return ModuleType.__getattribute__(self, name)
        finally:
            if locked:
                _RUNNING.release()

    def _run(self) -> None:
        finder = vars(self).pop("_finder", None)
        if finder in sys.meta_path:  # the package runs now, before all its modules
            sys.meta_path.remove(finder)
        run(vars(self).pop("_after", ""))
        assert self.__spec__ is not None and self.__spec__.loader is not None
        try:
            self.__spec__.loader.exec_module(self)
        finally:
            self.__class__ = ModuleType  # type: ignore[assignment]


def enter(
    name: str, stand_ins: Mapping[str, Any] | None = None, after: str = "", alone: Collection[str] | None = ()
) -> None:
    """Defer the code of a module; do nothing if it is already in ``sys.modules``, or does not exist.

    Args:
        stand_ins: functions and classes to use until the module's code has run. Code that has already fetched a
            stand-in keeps it.
        after: a module to run first, if it is deferred.
        alone: modules of the package that do not need the package's code; None: all.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    _make_late(module, stand_ins or {}, after, alone)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def put_off(name: str, alone: Collection[str] | None = ()) -> None:
    """Defer a module like ``enter``, but only when the package that contains it imports it."""
    import_by(name, lambda module, _loader: _make_late(module, {}, "", alone))


def run(name: str) -> None:
    """Run the code of a deferred module; do nothing if it has run, or the module is not imported."""
    if not has_run(name) and name in sys.modules:
        getattr(sys.modules[name], "any_name", None)  # a missing name runs the code, see ``_LateModule``


def import_by(name: str, execute: Execute) -> None:
    """Make ``execute(module, loader)`` run this module, in place of its loader, when it is first imported."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, execute))


class _Finder(MetaPathFinder):
    """A finder for one module, which removes itself after one use."""

    def __init__(self, name: str, execute: Execute) -> None:
        self._name, self._execute = name, execute

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._execute)
        return spec


class _Loader(Loader):
    """A loader that calls ``execute`` and then gives the module its original loader back."""

    def __init__(self, loader: Loader, execute: Execute) -> None:
        self._loader, self._execute = loader, execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._execute(module, self._loader)


def _make_late(module: ModuleType, stand_ins: Mapping[str, Any], after: str, alone: Collection[str] | None) -> None:
    module.__class__ = _LateModule
    vars(module).update(_stand_ins=dict(stand_ins), _after=after)
    if alone is not None and hasattr(module, "__path__"):
        vars(module)["_finder"] = finder = _PackageFirst(module.__name__, alone)
        sys.meta_path.insert(0, finder)


class _PackageFirst(MetaPathFinder):
    """A finder that runs a deferred package before one of its modules is imported."""

    def __init__(self, package: str, alone: Collection[str]) -> None:
        self._package, self._alone = package, alone

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, own_name = name.rpartition(".")
        if package != self._package or own_name in self._alone or has_run(package):
            return None
        run(package)
        return importlib.util.spec_from_loader(name, _Imported(sys.modules[name])) if name in sys.modules else None


class _Imported(Loader):
    """The loader of a module that its package imported just before Python would have."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def has_run(name: str) -> bool:
    """Return whether the module's code has run, and the module is not just entered."""
    return name in sys.modules and "_stand_ins" not in vars(sys.modules[name])
