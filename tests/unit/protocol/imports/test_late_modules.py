"""Modules whose code runs when somebody asks for one of their names."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_protocol.imports.late_modules import enter, has_run, import_by, put_off, run

_numbers = itertools.count()
MakePackage = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePackage:
    """Makes a package that nobody has imported, with a module ``part``; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(init: str = "value = 1\n", part: str = "value = 2\n") -> str:
        name = f"late_package_{next(_numbers)}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(init)
        (tmp_path / name / "part.py").write_text(part)
        importlib.invalidate_caches()
        return name

    return make


def test_a_name_runs_the_package_once(package: MakePackage) -> None:
    name = package("import itertools\ncounter = itertools.count()\nnext(counter)\n")
    enter(name)
    module = importlib.import_module(name)
    assert not has_run(name)
    assert (next(module.counter), next(module.counter)) == (1, 2)
    assert has_run(name) and not hasattr(module, "other")


@pytest.mark.parametrize("alone", [["part"], None])
def test_its_modules_are_imported_without_it(package: MakePackage, alone: list[str] | None) -> None:
    name = package()
    enter(name, alone=alone)
    assert importlib.import_module(f"{name}.part").value == 2
    assert not has_run(name)
    assert importlib.import_module(name).value == 1 and importlib.import_module(name).part.value == 2


@pytest.mark.parametrize(
    "late", [lambda name: enter(name), lambda name: (put_off(name), importlib.import_module(name))]
)
@pytest.mark.parametrize("init", ["from . import part\nvalue = 1\n", "value = 1\n"], ids=["imports-it", "does-not"])
def test_a_package_runs_before_its_modules(package: MakePackage, init: str, late: Callable[[str], object]) -> None:
    """Once each, also if it imports them itself: the other way round they might lack what it defines."""
    name = package(init, "import itertools\nfrom . import __name__ as package\ncounter = itertools.count()\n")
    finders = list(sys.meta_path)
    late(name)
    part = importlib.import_module(f"{name}.part")
    assert has_run(name) and sys.modules[name].value == 1 and sys.meta_path == finders
    assert sys.modules[name].part is part is sys.modules[f"{name}.part"] and part.__spec__.loader is part.__loader__
    next(part.counter)
    assert next(importlib.import_module(f"{name}.part").counter) == 1


def test_stand_ins_do_until_it_runs(package: MakePackage) -> None:
    name = package("def double(x): return 2 * x\nvalue = double(1)\n")
    enter(name, {"double": lambda x: ("later", x)})
    module = importlib.import_module(name)
    assert module.double(3) == ("later", 3) and not has_run(name)
    assert module.value == 2
    assert module.double(3) == 6


def test_what_has_run_or_is_not_there_stays_as_it_is(package: MakePackage) -> None:
    name = package()
    module = importlib.import_module(name)
    enter(name)
    enter("no_such_package_anywhere")
    assert sys.modules[name] is module and has_run(name)
    assert "no_such_package_anywhere" not in sys.modules


def test_what_is_entered_after_another_runs_that_first(package: MakePackage) -> None:
    name, before = package("import builtins\nvalue = builtins.late_modules_test[:]\n"), package()
    vars(importlib.import_module("builtins"))["late_modules_test"] = order = []  # type: ignore[var-annotated]
    put_off(f"{before}.part")
    import_by(before, lambda module, loader: (loader.exec_module(module), order.append("its package"))[0])
    try:
        importlib.import_module(f"{before}.part")
        enter(name, after=f"{before}.part")
        assert not has_run(f"{before}.part") and order == ["its package"]
        assert importlib.import_module(name).value == ["its package"]
        assert has_run(f"{before}.part")
    finally:
        del vars(importlib.import_module("builtins"))["late_modules_test"]


def test_a_module_is_put_off_before_its_package_is_imported(package: MakePackage) -> None:
    name = package("from . import part\n")
    finders = list(sys.meta_path)
    put_off(f"{name}.part")
    part = importlib.import_module(name).part
    assert not has_run(f"{name}.part") and vars(part).get("value") is None
    run(f"{name}.part")
    assert has_run(f"{name}.part") and vars(part)["value"] == 2
    run(f"{name}.part"), run("no_such_module_anywhere")
    put_off(f"{name}.part")  # too late
    assert has_run(f"{name}.part") and sys.meta_path == finders
    assert importlib.reload(part).value == 2


def test_another_thread_waits_until_all_of_it_is_there(package: MakePackage) -> None:
    """Its code tells the thread that asks meanwhile, and goes on once that has asked."""
    name = package("import builtins\nfirst = 1\nbuiltins.late_modules_test()\nlast = 2\n")
    enter(name)
    found: list[object] = []

    def ask() -> None:
        found.append(getattr(sys.modules[name], "last", None))

    asking = threading.Thread(target=ask)

    def halfway() -> None:
        asking.start()
        assert found == []

    vars(importlib.import_module("builtins"))["late_modules_test"] = halfway
    try:
        assert sys.modules[name].first == 1
        asking.join()
    finally:
        del vars(importlib.import_module("builtins"))["late_modules_test"]
    assert found == [2]
