"""What the doctor finds where something is broken, and that nothing it looks at can hold it up."""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import platform
import socket
import sys
import threading

import pytest
import torch

from swarm_cli.doctor.check import DoctorCheck, Grade, findings_of, ok
from swarm_cli.doctor.machine import listening, writable
from swarm_cli.doctor.members import clock, look, reached, registered, seen
from swarm_cli.doctor.model_files import model_checks
from swarm_cli.doctor.platform import lacking
from swarm_cli.doctor.software import compiled_kernel, packages, processor, software_checks
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_models.kernels.library import ENV_ISA, kernel
from swarm_protocol.dht.records import LIFETIME_S, ServerRecord
from swarm_protocol.errors import NoSwarm
from swarm_protocol.process.local_registry import RegistryEntry
from swarm_protocol.span import Span
from tests.worlds.virtual_time import run_virtually

NOW_S = 1_000_000.0
OWN, OTHER = "QmOwn", "QmOther"


def server(peer_id: str, span: str = "0:2", *, answers: bool = True, **fields) -> ServerStatus:
    known = {"addresses": ("10.0.0.1:5",), "model": "m", "revision": "r", "num_blocks": 2}
    record = ServerRecord(
        peer_id=peer_id, span=Span.parse(span), **{**known, "expires_at": NOW_S + LIFETIME_S - 10, **fields}
    )
    return ServerStatus(record, 0.001 if answers else None, answers)


def swarm_of(*servers: ServerStatus) -> SwarmSnapshot:
    return SwarmSnapshot((ModelStatus("m", 2, servers, "r"),))


def test_a_check_that_hangs_or_fails_is_a_finding():
    forever = threading.Event()

    def raising():
        yield ok("half", "done")
        raise OSError("the disk is gone")

    checks = [
        DoctorCheck("slow", lambda: [ok("slow", str(forever.wait()))], timeout_s=0.01),
        DoctorCheck("broken", raising),
        DoctorCheck("fine", lambda: [ok("fine", "yes")]),
    ]
    slow, broken, fine = findings_of(checks)
    forever.set()
    assert (slow.subject, slow.grade, slow.found) == ("slow", Grade.FAILED, "nothing was found out within 0.01 s")
    assert (broken.grade, broken.found) == (Grade.FAILED, "cannot be checked: the disk is gone")
    assert fine.grade == Grade.OK


def test_packages_are_compared_with_what_is_required():
    found = packages(["torch>=99", "no-such-package", "numpy>=1", "openai>=999; extra == 'serve'"])
    assert found.grade == Grade.FAILED and "pip install" in found.to_do
    assert "torch is " in found.found and "expected >=99" in found.found and "no-such-package is missing" in found.found
    assert "openai" not in found.found
    assert packages(["numpy>=1"]).grade == Grade.OK


@pytest.fixture
def chosen(monkeypatch):
    """Sets the instruction set that the kernel is to use."""
    yield lambda name: (monkeypatch.setenv(ENV_ISA, name), kernel.cache_clear())
    monkeypatch.undo()
    kernel.cache_clear()


def test_the_kernel_is_named_or_why_there_is_none(chosen):
    library = kernel()
    for name in [] if library is None else library.names:
        chosen(name)
        found = compiled_kernel()
        assert found.grade == Grade.OK and f"it uses {name}" in found.found
    chosen("off")
    found = compiled_kernel()
    assert found.grade == Grade.WARNING and f"none ({ENV_ISA} is off)" in found.found and "unset" in found.to_do
    chosen("abacus")
    (found,) = findings_of([DoctorCheck("kernel", lambda: [compiled_kernel()])])
    assert found.grade == (Grade.WARNING if library is None else Grade.FAILED)
    assert library is None or "'abacus' does not run here" in found.found


def test_a_processor_without_vectors(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert processor({"sse2"}).grade == Grade.WARNING
    assert "with AVX2" in processor({"avx2"}).found
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert processor({"asimd"}).grade == Grade.OK


def test_what_a_system_lacks_is_named(monkeypatch):
    if sys.platform == "linux":
        assert list(lacking()) == []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    lines = [finding.found for finding in lacking()]
    assert all(finding.grade == Grade.OK for finding in lacking()), "there is nothing to do about it"
    for what in ("pidfd", "huge pages", "safe fork", "abstract sockets", "limit of address space"):
        assert any(line.startswith(f"no {what}: ") for line in lines), what
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "hivemind", None)
    first = next(lacking())
    assert first.grade == Grade.FAILED and first.found.startswith("Windows has no libp2p") and "WSL" in first.to_do


def test_an_accelerator_without_kernels_says_what_runs_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    (found,) = next(check for check in software_checks() if check.subject == "GPU").run()
    assert found.found.startswith("mps computes blocks with --quant none; int8, int4, nf4, bnb-int8 have no kernel")


def test_directories(tmp_path):
    assert writable("cache", tmp_path / "new", "X").grade == Grade.OK
    (tmp_path / "file").touch()
    found = writable("cache", tmp_path / "file" / "cache", "XDG_CACHE_HOME")
    assert found.grade == Grade.FAILED and "XDG_CACHE_HOME" in found.to_do


def test_ports():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = listening("127.0.0.1", taken.getsockname()[1])
    assert found.grade == Grade.FAILED and "choose another --port" in found.to_do
    assert "own addresses" in listening("192.0.2.1", 0).to_do
    assert listening("127.0.0.1", 0).grade == listening(None, 0).grade == Grade.OK


@pytest.mark.parametrize(
    ("remaining_s", "grade", "words"),
    [
        ([100.0, 110.0, 119.0], Grade.OK, "that of 3 other servers"),
        ([40.0, 45.0, 110.0], Grade.FAILED, "65 s ahead of"),
        ([190.0], Grade.FAILED, "80 s behind"),
    ],
)
def test_clocks_are_compared_by_what_records_expire(remaining_s, grade, words):
    found = clock(remaining_s)
    assert found.grade == grade and words in found.found


def test_a_swarm_that_is_well():
    model, time = seen("s", swarm_of(server(OTHER)), frozenset(), NOW_S)
    assert model.grade == time.grade == Grade.OK
    assert "1 of 1 servers answer, in 1.0 to 1.0 ms" in model.found


@pytest.mark.parametrize(
    ("snapshot", "grade", "words"),
    [
        (swarm_of(server(OTHER, "0:1")), Grade.FAILED, "nobody serves blocks 1:2"),
        (swarm_of(server(OTHER), server(OWN, answers=False)), Grade.WARNING, "1 of 2 servers answer"),
        (swarm_of(server(OTHER), server(OWN, wire_version=1)), Grade.FAILED, "QmOwn speaks 1"),
        (SwarmSnapshot(()), Grade.FAILED, "has no servers"),
    ],
)
def test_a_swarm_that_is_not(snapshot, grade, words):
    findings = list(seen("s", snapshot, frozenset(), NOW_S))
    assert any(finding.grade == grade and words in finding.found and finding.to_do for finding in findings), findings


def test_the_clock_is_not_compared_with_this_machine():
    _, time = seen("s", swarm_of(server(OWN, expires_at=NOW_S)), frozenset([OWN]), NOW_S)
    assert time.grade == Grade.OK and "cannot be compared" in time.found


def test_whether_others_reach_a_server_of_this_machine():
    far, here = ["/ip4/10.0.0.1/tcp/5"], ["/ip4/127.0.0.1/tcp/5"]
    knows = server(OTHER, next_hop_rtts_s={OWN: 0.004})
    assert "is reached by" in (found := reached(OWN, far, [server(OWN), knows])).found and "4.0 ms" in found.found
    assert found.grade == Grade.OK
    assert reached(OWN, far, [server(OWN), server(OTHER)]).grade == Grade.WARNING
    assert "this machine alone" in reached(OWN, here, [server(OWN)]).found
    silent = reached(OWN, far, [server(OWN, answers=False)])
    assert silent.grade == Grade.FAILED and "10.0.0.1:5" in silent.found
    assert reached(OWN, far, [server(OTHER)]).grade == Grade.FAILED


@pytest.mark.parametrize(
    ("answers", "num_reads", "num_servers"),
    [
        ([swarm_of(server(OWN))], 1, 1),
        ([SwarmSnapshot(()), swarm_of(server(OWN))], 2, 1),
        ([swarm_of(server(OTHER)), swarm_of(server(OWN), server(OTHER))], 2, 2),
        ([SwarmSnapshot(()), SwarmSnapshot(())], 2, 0),
        ([SwarmSnapshot(()), None], 2, 0),
        ([swarm_of(server(OTHER)), SwarmSnapshot(())], 2, 1),
        ([swarm_of(server(OTHER)), NoSwarm("nobody answers")], 2, 1),
    ],
    ids=["listed", "none at first", "another at first", "never", "hangs the second time", "emptier", "gone"],
)
def test_a_swarm_that_lacks_a_server_of_this_machine_is_read_once_more(answers, num_reads, num_servers):
    reads = []

    async def read(config: ClientConfig) -> SwarmSnapshot:
        reads.append(config)
        answer = answers[len(reads) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is not None else await asyncio.Event().wait()

    async def check() -> None:
        snapshot = await look(ClientConfig(), {OWN}, read)
        assert sum(len(model.servers) for model in snapshot.models) == num_servers
        assert len(reads) == num_reads

    run_virtually(check(), limit_s=16)  # the second look may take 15 s


def test_nothing_is_read_twice_where_no_server_of_this_machine_runs():
    reads = []

    async def read(config: ClientConfig) -> SwarmSnapshot:
        reads.append(config)
        return SwarmSnapshot(())

    assert asyncio.run(look(ClientConfig(), set(), read)) == SwarmSnapshot(()) and len(reads) == 1


def test_registered_servers():
    entries = [RegistryEntry(OWN, (), True), RegistryEntry(OTHER, (), False)]
    assert registered("s", entries[:1]).found == "1 of swarm s on this machine"
    assert registered("s", []).found == "none of swarm s on this machine"
    assert registered("s", entries).grade == Grade.WARNING


def test_models(tmp_path):
    def model(name: str):
        checks = model_checks(name, None, ClientConfig(swarm="nobody-serves-this"))
        (found,) = findings_of([check for check in checks if check.subject == "model"])
        return found

    assert "can be loaded: llama, 20 blocks" in model("tiny-python-docs").found
    assert model(str(tmp_path)).grade == Grade.FAILED and model(str(tmp_path)).to_do == "check the directory"
    assert "name and the network" in model("nobody/has-this").to_do
    assert "members of that swarm" in model("swarm://nobody/has-this").to_do


def test_servers_that_are_reached_through_relays_are_named_with_them():
    relay = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    target = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    addresses = ("192.168.1.5:5", f"/ip4/192.0.2.1/tcp/1/p2p/{relay}/p2p-circuit/p2p/{target}")
    own = dataclasses.replace(server(target, addresses=addresses), relay_id=relay)
    found = reached(target, ["/ip4/192.168.1.5/tcp/5"], [own])
    assert found.grade == Grade.OK and f"is reached, through relay …{relay[-6:]}" in found.found
    found = reached(target, ["/ip4/192.168.1.5/tcp/5"], [dataclasses.replace(own, relay_id="")])  # nobody has tried it
    assert "is reached" not in found.found and f"is announced, through relay …{relay[-6:]}" in found.found
    swarm, *_ = seen("s", swarm_of(own, server(OTHER)), frozenset(), NOW_S)
    assert f"…{target[-6:]} via …{relay[-6:]}; the others directly" in swarm.found
