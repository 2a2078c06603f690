"""Facts about the machine where Linux's files or calls are missing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import psutil
import pytest

from swarm_protocol import system

BOOT = "5C0E6E9B-6C2C-4D2B-8D0C-000000000001"


@pytest.fixture
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No files of Linux's kernel, and a directory of programs, which has none yet."""
    for name in ("_BOOT_ID", "_CPU_INFO"):
        monkeypatch.setattr(system, name, tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    system.boot_id.cache_clear()
    monkeypatch.setattr(system, "boot_id", system.boot_id.__wrapped__)
    return tmp_path


def test_a_mac_is_known_by_its_boot_whatever_its_name(no_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = no_files / "sysctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = -n ] && [ "$2" = kern.bootsessionuuid ] && echo {BOOT} && exit\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(platform, "node", lambda: "laptop.here")
    assert system.boot_id() == BOOT
    program.unlink()
    assert system.boot_id() == "laptop.here"


def test_a_processor_has_a_name_everywhere(no_files: Path) -> None:
    assert system.processor_name()
    (no_files / "sysctl").write_text("#!/bin/sh\necho Apple M1\n")
    (no_files / "sysctl").chmod(0o755)
    assert system.processor_name() == "Apple M1"


def test_all_cores_may_be_used_where_nobody_can_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else 3)
    assert system.usable_cpus() == {0, 1, 2}


def test_memory_is_known() -> None:
    assert 0 < system.available_bytes() < psutil.virtual_memory().total
    assert psutil.Process().memory_info().rss // 2 < system.peak_resident_bytes() < 1 << 45


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system cannot restart the peak")
def test_the_peak_begins_again() -> None:
    system.restart_peak()
    before = system.peak_resident_bytes()
    bytearray(1 << 27)
    assert system.peak_resident_bytes() > before + (1 << 26)
    system.restart_peak()
    assert system.peak_resident_bytes() < before + (1 << 26)


def test_the_peak_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def memory_info(self) -> Process:
            return self

        peak_wset = 7

    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil, "Process", Process)
    assert system.peak_resident_bytes() == 7


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((256, -1), (4096, -1)), ((256, 2000), (2000, 2000)), ((1024, 9000), (1024, 9000)), ((-1, -1), (-1, -1))],
)
def test_a_low_limit_of_open_files_is_raised(
    limits: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    found = {resource.RLIMIT_NOFILE: limits}
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    system.raise_open_files()
    assert found == {resource.RLIMIT_NOFILE: expected}


def test_threads_of_openmp_spin_as_the_user_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        monkeypatch.setattr(os, "environ", dict(given))
        system.spin_little()
        assert os.environ.get("GOMP_SPINCOUNT") == expected
