"""Packages can be imported where Linux's modules, functions and constants are missing, as on macOS and Windows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_protocol.errors import SwarmError
from swarm_protocol.imports.libp2p import require_libp2p, why_no_libp2p

ROOT = Path(__file__).parents[2]
PACKAGES = [path.parent.name for path in sorted(ROOT.glob("swarm_*/__init__.py"))]
MODULES = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "termios", "tty", "uvloop"}
MISSING = {  # on Windows, or on macOS
    "os": {
        *("fchmod", "fork", "geteuid", "getuid", "killpg", "memfd_create", "pidfd_open", "pread", "pwrite"),
        *("sched_getaffinity", "sched_setaffinity", "setpgid", "setpriority", "sysconf", "uname"),
    },
    "select": {"epoll", "poll"},
    "signal": {"SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGSTOP", "SIGUSR1", "pidfd_send_signal"},
    "socket": {"AF_UNIX", "SO_REUSEPORT"},
}
LEFT_OUT = ("__main__", "._kernel", ".lightning_callback")  # the last one needs an extra
# Imports everything once, for other packages that look for the same modules; then again, with all of that missing.
IMPORTS_ALL = f"""
import importlib, os, pkgutil, select, signal, socket, sys
PACKAGES, MODULES, MISSING, LEFT_OUT = {PACKAGES!r}, {MODULES!r}, {MISSING!r}, {LEFT_OUT!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name in MODULES and frame.f_globals.get("__name__", "").startswith("swarm_"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def import_all():
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, package + "."):
            if not module.name.endswith(LEFT_OUT) and ".triton_" not in module.name:
                importlib.import_module(module.name)

import_all()
for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES or name in MODULES]:
    del sys.modules[name]
for module, names in MISSING.items():
    for name in names:
        vars(sys.modules[module]).pop(name, None)
sys.meta_path.insert(0, Blocker())
import_all()
print(len([name for name in sys.modules if name.partition(".")[0] in PACKAGES]))
"""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but bodies of functions, and what is tried and may fail."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) and any("ImportError" in ast.dump(each) for each in child.handlers):
            continue
        yield child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for each in (*child.args.defaults, *filter(None, child.args.kw_defaults)):
                yield from (each, *run_at_import(each))
        else:
            yield from run_at_import(child)


def is_missing(node: ast.AST) -> bool:
    """Whether this imports a module, or takes a function or constant of one, that is not on every system."""
    if isinstance(node, ast.Import):
        return any(alias.name in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in MODULES or any(alias.name in MISSING.get(node.module or "", ()) for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in MISSING.get(node.value.id, ())
    )


def test_no_import_needs_linux() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in sources()
        for node in run_at_import(ast.parse(path.read_text()))
        if is_missing(node)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import fcntl", 1),
        ("from resource import getrlimit", 1),
        ("from signal import SIGHUP", 1),
        ("class A:\n    number = signal.SIGHUP", 1),
        ("def a(cpus=os.sched_getaffinity(0)): pass", 1),
        ("def a():\n    import fcntl", 0),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", 0),
        ("import os\nnumber = os.getpid()", 0),
    ],
)
def test_what_would_be_found(source: str, count: int) -> None:
    assert sum(map(is_missing, run_at_import(ast.parse(source)))) == count


@pytest.mark.slow
def test_everything_is_imported_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS_ALL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 500


def test_without_libp2p_each_command_says_so_in_a_line() -> None:
    script = (
        "import sys; sys.modules['hivemind'] = None; sys.argv = ['swarm', 'status'];"
        "from swarm_cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line in (
        "error: hivemind is not installed, whose libp2p daemon connects a swarm: pip install hivemind",
        "error: Windows has no libp2p daemon, which connects a swarm: install Swarm in WSL, which is Linux",
    )


def test_on_windows_it_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_libp2p() == "" or sys.platform == "win32"
    monkeypatch.setitem(sys.modules, "hivemind", None)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SwarmError, match=r"Windows has no libp2p daemon.*: install Swarm in WSL, which is Linux"):
        require_libp2p()


def test_torch_shares_memory_in_the_only_way_that_it_knows_on_a_mac() -> None:
    script = (
        "import os, sys; sys.platform = 'darwin'; import swarm_protocol;"
        "print([name for name in os.environ if 'SHARING' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env={})
    assert done.stdout == "[]\n", done.stderr
