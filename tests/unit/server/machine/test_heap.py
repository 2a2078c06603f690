"""The heap is trimmed when the process has grown, and then only."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from swarm_server.machine.heap import GROWN_BYTES, MUCH_BYTES, HeapTrimmer
from tests.unit.support import run

pytestmark = pytest.mark.usefixtures("quick_collections")
MIB = 1 << 20
PROGRAM = """
import asyncio, torch
from swarm_server.machine.heap import freed_memory_returned, HeapTrimmer, _resident_bytes

with freed_memory_returned():
    pass
trimmer = HeapTrimmer()
asyncio.run(trimmer.trim())
pieces = [torch.ones(1 << 16) for _ in range(2000)]
full = _resident_bytes()
pieces = pieces[::20]  # what stays keeps the heap from shrinking at its end
kept = _resident_bytes()
asyncio.run(trimmer.trim())
print(full, kept, _resident_bytes())
"""


def test_only_if_it_has_grown() -> None:
    sizes, trims = [100 * MIB], []
    trimmer = HeapTrimmer(lambda: sizes[-1], lambda: trims.append(sizes[-1]))
    run(trimmer.trim())
    assert trims == [100 * MIB]
    sizes.append(100 * MIB + GROWN_BYTES - 1)
    run(trimmer.trim())
    assert len(trims) == 1
    sizes.append(100 * MIB + GROWN_BYTES)
    run(trimmer.trim())
    assert len(trims) == 2


async def test_again_after_it_has_given_much() -> None:
    sizes, given = [500 * MIB], [100 * MIB, MUCH_BYTES, MUCH_BYTES - 1, 0]
    trims: list[int] = []

    def trim() -> None:
        trims.append(sizes[-1])
        sizes.append(sizes[-1] - given[len(trims) - 1])

    trimmer = HeapTrimmer(lambda: sizes[-1], trim)
    for _ in range(10):
        await trimmer.trim()
    assert len(trims) == 3


async def test_what_is_freed_later_is_given_back_too() -> None:
    """Nothing grows by it. In vain it is tried more and more seldom, and not at all once the process is small again."""
    in_use, sizes = [100 * MIB], [100 * MIB]
    trims: list[int] = []
    look = 0

    def trim() -> None:
        trims.append(look)
        sizes.append(in_use[-1])

    trimmer = HeapTrimmer(lambda: sizes[-1], trim)
    await trimmer.trim()
    in_use.append(400 * MIB)
    sizes.append(400 * MIB)
    while look < 60:
        look += 1
        await trimmer.trim()
    assert trims == [0, 1, 2, 4, 8, 16, 32, 48]
    in_use.append(100 * MIB)
    while look < 200:
        look += 1
        await trimmer.trim()
    assert trims[8:] == [64, 65]


def test_the_system_gets_the_memory_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    full, kept, after = map(int, output.split())
    assert kept > full - 100 * MIB
    assert after < full - 350 * MIB
