"""The number of threads with which a server computes, so that the servers of one machine share its cores."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import IO

import platformdirs

from swarm_protocol.file_lock import lock, try_lock
from swarm_protocol.system import boot_id, usable_cpus

_logger = logging.getLogger(__name__)
CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def fair_threads(mine: set[int], others: Sequence[set[int]], num_earlier: int | None = None) -> int:
    """Return a server's share of the cores it may use. Each core is divided evenly among the servers that may use it.

    mine, others: the cores of this server and of each other server. The first ``num_earlier`` others (by default all)
    began before this server. The share is rounded down, and at least 1. Earlier servers get what rounding leaves among
    servers with equal cores.
    """
    share = sum((Fraction(1, 1 + sum(core in other for other in others)) for core in mine), Fraction())
    equals = [index for index, other in enumerate(others) if other == mine]
    later = 0 if num_earlier is None else sum(index >= num_earlier for index in equals)
    # floor(share + i / n), summed over i < n, is floor(n * share): together, n servers never exceed what they share
    return max(1, math.floor(share + Fraction(later, 1 + len(equals))))


class CoreShare:
    """This server's part of the machine's cores, as a context manager.

    While the context is active, other servers see this server through a file on which it holds a lock. The system
    releases the lock when a process is killed.
    """

    def __init__(
        self,
        directory: Path | None = None,
        cores: Collection[int] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Choose ``directory``, where this machine's servers register, by default in the user's cache directory.

        ``cores`` are by default the physical cores that this process may use. ``OMP_NUM_THREADS``, if set, is obeyed.
        """
        self._directory = directory or platformdirs.user_cache_path("swarm") / "cores"
        self._cores = physical_cores(usable_cpus()) if cores is None else set(cores)
        self._fixed = _omp_num_threads(environment)
        self._limit = self._fixed or max(1, int(min(cpu_quota(), len(self._cores))))
        self._path: Path | None = None  # the file through which other servers see this one
        self._file: IO[str] | None = None

    def __enter__(self) -> CoreShare:
        """Register; if not all cores may be kept busy, take the cores that the fewest other servers use."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(self._directory / "lock", "w") as opened:
                lock(opened)
                self._choose()
                self._register()
        except OSError as error:
            self._withdraw()
            self._choose()
            _logger.warning("servers of this machine will not share its cores as they should: %s", error)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._withdraw()

    def _choose(self) -> None:
        others = list(self._others().values())
        by_use = sorted(self._cores, key=lambda core: (sum(core in other for other in others), core))
        self._cores = set(by_use[: self._limit])

    def threads(self) -> int:
        """Return how many threads to compute with now. It takes a few dozen microseconds per server of the machine."""
        if self._fixed:
            return self._fixed
        others = self._others()
        num_earlier = None if self._path is None else sum(path < self._path for path in others)
        return fair_threads(self._cores, list(others.values()), num_earlier)

    def _register(self) -> None:
        """Register under another name at first, because an unlocked file would be taken for a dead server's."""
        path = self._directory / f"{time.time_ns():020}-{os.getpid()}.json"
        self._path = path.with_suffix(".partial")
        self._file = open(self._path, "w")  # noqa: SIM115  (kept open: the lock goes with it)
        lock(self._file)
        json.dump({"pid": os.getpid(), "boot": boot_id(), "cores": sorted(self._cores)}, self._file)
        self._file.flush()
        self._path = self._path.rename(path)

    def _withdraw(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
        if self._file is not None:
            with suppress(OSError):  # of data that could not be written
                self._file.close()
            self._file = None

    def _others(self) -> dict[Path, set[int]]:
        """Return the cores of other living servers, oldest first; delete the registrations of dead servers."""
        others = {}
        for path in sorted(self._directory.glob("*.json")):
            if path == self._path:
                continue
            try:
                with open(path) as file:
                    if not try_lock(file, shared=True):  # several servers may ask at once
                        entry = json.load(file)
                        if entry["boot"] == boot_id():  # home directories are shared between machines
                            others[path] = set(entry["cores"])
                    else:
                        path.unlink(missing_ok=True)
            except (OSError, ValueError, KeyError, TypeError):  # the server just ended, or the file is not ours
                pass
        return others


def _omp_num_threads(environment: Mapping[str, str]) -> int | None:
    """Return the user's choice. OpenMP reads "4,2" as 4 outside nested loops, and ignores what is not a number."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


# ---------------------------------------------------------------- what the system reports


def physical_cores(cpus: Collection[int], directory: Path = CPUS) -> set[int]:
    """Return a number for each core that has some of ``cpus``: its first CPU. A CPU of unknown core counts as one."""
    return {_first_sibling(cpu, directory) for cpu in cpus}


def _first_sibling(cpu: int, directory: Path) -> int:
    topology = directory / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # "3,67" or "0-1"; the latter is what old kernels have
        try:
            return int((topology / name).read_text().replace("-", ",").split(",")[0])
        except (OSError, ValueError):
            continue
    return cpu


def cpu_quota(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> float:
    """Return how many CPUs' time the control groups of this process grant, in either version; inf without a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in [root / controllers, root / "cpu"] if controllers else [root, root / "unified"]:
            group = mount / path.lstrip("/")
            # A container sees its group as the root, and often under a name that exists only outside.
            for directory in [group, *group.parents]:
                if directory.is_relative_to(mount):
                    quota = min(quota, _quota_of(directory))
    return quota


def _quota_of(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else math.inf
    except (OSError, ValueError):  # not there, or "max"
        return math.inf
