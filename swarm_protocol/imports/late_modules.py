"""Modules that are importable before their code has run, which it does once somebody asks for one of their names.

That of a package runs before that of its modules, too, as Python has it, unless they are said to do without.
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
        finder = vars(self).pop("_finder", None)
        if finder in sys.meta_path:
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
    """Puts off the code of a module; does nothing if it has run, or there is no such module.

    Args:
        stand_ins: functions and classes that do instead of the module's own until its code has run. Who has got one by
            then keeps it.
        after: a module that is run first, if it has been put off.
        alone: modules of the package that do without its code; None: all.
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
    """As ``enter``, for a module whose package has not been imported: puts it off once the package asks for it."""
    import_by(name, lambda module, _loader: _make_late(module, {}, "", alone))


def run(name: str) -> None:
    """Runs a module's code that has been put off; does nothing if it has run, or nobody has imported it."""
    if not has_run(name) and name in sys.modules:
        getattr(sys.modules[name], "any_name", None)


def import_by(name: str, execute: Execute) -> None:
    """Once somebody imports this module, ``execute(module, loader)`` runs it, in the place of its loader."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, execute))


class _Finder(MetaPathFinder):
    """Of one module, once."""

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
    """Leaves no trace in the module."""

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
    """Runs a package that has been put off before one of its modules is imported."""

    def __init__(self, package: str, alone: Collection[str]) -> None:
        self._package, self._alone = package, alone

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, own_name = name.rpartition(".")
        if package != self._package or own_name in self._alone or has_run(package):
            return None
        run(package)
        return importlib.util.spec_from_loader(name, _Imported(sys.modules[name])) if name in sys.modules else None


class _Imported(Loader):
    """Of a module that its package has imported while Python was about to."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def has_run(name: str) -> bool:
    """Whether the module is there with all it has, and not only entered."""
    return name in sys.modules and "_stand_ins" not in vars(sys.modules[name])
