"""Groups of processes with a limited share of the processors: several slow machines on one. Needs Linux and root."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from swarm_protocol.errors import SwarmError

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000  # short, so that a process never stands still for long
_numbers = itertools.count()


@contextlib.contextmanager
def cpu_share(cores: float) -> Iterator[list[str]]:
    """Yield the words that go before a command so that it and its children use at most so many cores.

    The command must have ended before the context does.

    Raises:
        SwarmError: this machine does not let us limit processes.
    """
    is_unified = (_CGROUPS / "cgroup.controllers").exists()  # version 2 of control groups
    group = (_CGROUPS if is_unified else _CGROUPS / "cpu") / f"swarm-benchmark-{os.getpid()}-{next(_numbers)}"
    quota_us = round(cores * _PERIOD_US)
    with contextlib.ExitStack() as cleanup:
        try:
            if is_unified:
                (_CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir()
            cleanup.callback(group.rmdir)
            if is_unified:
                (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(f"{_PERIOD_US}")
                (group / "cpu.cfs_quota_us").write_text(f"{quota_us}")
        except OSError as error:
            raise SwarmError(
                f"cannot limit processes to {cores:g} cores: {error} (expected Linux control groups, as root)"
            ) from None
        yield ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
