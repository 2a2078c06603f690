"""The check of what this system lacks and others have; it finds nothing where nothing is lacking."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator

from swarm_cli.doctor.check import DoctorCheck, Finding, failed, ok
from swarm_protocol.imports.libp2p import why_no_libp2p
from swarm_protocol.process.signals import HANGUP


def platform_checks() -> list[DoctorCheck]:
    return [DoctorCheck("system", lacking)]


def lacking() -> Iterator[Finding]:
    """Yield a finding for each thing that is missing here, with what happens instead."""
    if reason := why_no_libp2p():
        found, _, to_do = reason.partition(": ")
        yield failed("system", found, to_do)
    is_linux = sys.platform == "linux"
    there = {
        "pidfd: a process is known by its number and start time": hasattr(os, "pidfd_open"),
        "files in memory: a key is written to the temporary directory while it is read": hasattr(os, "memfd_create"),
        "huge pages: weights on the CPU are read 5 to 12 % slower": hasattr(mmap, "MADV_HUGEPAGE"),
        "safe fork: each server of `swarm demo` takes seconds longer to start": is_linux,
        "abstract sockets: ports of servers are claimed for this user alone": is_linux,
        "affinity of processes: servers share all cores of the machine": hasattr(os, "sched_getaffinity"),
        "limit of address space: the check of an answer's grammar is limited by time alone": is_linux,
        "SIGHUP: a command does not notice that its terminal is closed": HANGUP is not None,
    }
    for what, is_there in there.items():
        if not is_there:
            yield ok("system", f"no {what}")
