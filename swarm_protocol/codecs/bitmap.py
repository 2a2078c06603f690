"""Sets of small numbers as bytes, such as the pieces that a member holds or the micro-batches in a peer's sums."""

from __future__ import annotations

from collections.abc import Iterable


def to_bits(numbers: Iterable[int], size: int) -> bytes:
    """Return the set with one bit for each of ``size`` numbers, the lowest bit of a byte first."""
    data = bytearray(-(-size // 8))
    for number in numbers:
        data[number // 8] |= 1 << number % 8
    return bytes(data)


def from_bits(data: bytes, size: int) -> frozenset[int]:
    """Return the numbers in the set. Raise ValueError if the length is not that of ``size`` bits."""
    if len(data) != -(-size // 8):
        raise ValueError(f"a set of {size} numbers takes {-(-size // 8)} bytes, and not {len(data)}")
    return frozenset(number for number in range(size) if data[number // 8] >> number % 8 & 1)


def contains(bits: bytes, number: int) -> bool:
    return number // 8 < len(bits) and bool(bits[number // 8] >> number % 8 & 1)


def size_of(bits: bytes) -> int:
    """Return how many numbers are in the set."""
    return _whole(bits).bit_count()


def are_disjoint(sets: Iterable[bytes]) -> bool:
    """Return whether no number is in two of the sets."""
    seen = 0
    for bits in map(_whole, sets):
        if seen & bits:
            return False
        seen |= bits
    return True


def is_partition(sets: Iterable[bytes], size: int) -> bool:
    """Return whether each of the numbers 0 to ``size`` - 1 is in exactly one of the sets."""
    sets = list(sets)
    return are_disjoint(sets) and sum(map(_whole, sets)) == (1 << size) - 1


def fits(bits: bytes, size: int) -> bool:
    """Return whether the bytes are a set of numbers below ``size``, with the length of such a set."""
    return len(bits) == -(-size // 8) and _whole(bits) >> size == 0


def _whole(bits: bytes) -> int:
    return int.from_bytes(bits, "little")
