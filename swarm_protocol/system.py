"""Facts about this machine, read from files on Linux and from sysctl(8) on macOS."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_INFO = Path("/proc/cpuinfo")
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SYSCTL_S = 5.0
_FEW_FILES, _MANY_FILES = 1024, 4096  # each connection is an open file


@functools.cache
def boot_id() -> str:
    """Return a text that differs between machines, and on Linux and macOS also between two boots of one machine.

    Elsewhere it is the machine's name.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # the name of a Mac changes with the network that it is in
        return sysctl("kern.bootsessionuuid") or platform.node()


def sysctl(name: str) -> str:
    """Return the value of a variable of the macOS kernel; an empty string if there is none, as on other systems."""
    try:
        asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=_SYSCTL_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use; one per core where the system does not say them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    import psutil

    return set(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1))


def processor_name() -> str:
    """Return the name of the processor's model, or of its kind where the system does not say the model."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # Linux names no models of ARM
        return sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def available_bytes() -> int:
    """Return the bytes of memory that programs can still take without swapping."""
    import psutil

    available: int = psutil.virtual_memory().available
    return available


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident memory in bytes; since ``restart_peak`` where that works."""
    try:
        import resource
    except ImportError:  # on Windows
        import psutil

        peak: int = psutil.Process().memory_info().peak_wset
        return peak
    with suppress(OSError, IndexError):
        return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    # macOS counts bytes here, other systems KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def restart_peak() -> None:
    """Let ``peak_resident_bytes`` begin with the memory that is used now. Only some Linux systems can do that."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")  # which resets the peak, see clear_refs in proc(5)


def spin_little() -> None:
    """Let threads of OpenMP sleep soon after a product. It has an effect only before torch is imported.

    By default they spin for milliseconds. With another process on the same cores, a block took 8 to 80 ms; with this
    little spinning, it takes 4 (on idle cores 2.4 instead of 2.2).
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # with which the user has decided
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def raise_open_files() -> None:
    """Raise the limit of open files of this process where it is low: 256 in shells of macOS."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit, or the system refuses
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < _FEW_FILES:  # on Linux, no limit is -1
            most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(_MANY_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
