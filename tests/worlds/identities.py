"""Identities that are the same in every run, since who leads depends on peer ids. Their keys are no secrets."""

from __future__ import annotations

import itertools
import random
from functools import cache

from swarm_protocol.net.identity import Identity
from tests.quick_keys import identity_of

_EXPONENT = 65537
_PRIME_BITS = 1024
# How far each prime is from where its search starts: to find one takes a third of a second.
_DISTANCES = (
    *(198, 286, 396, 564, 1230, 330, 4791, 59, 814, 713, 2192, 754, 105, 146, 486, 513, 70, 1524, 62, 1558),
    *(653, 548, 186, 13, 173, 203, 333, 1444, 3079, 772, 153, 500, 1004, 2771, 2067, 255, 843, 740, 859, 759),
)


@cache
def identity(number: int) -> Identity:
    """Of a pair of primes: few of those, which take long to find, make many identities."""
    second = next(index for index in itertools.count(1) if index * (index + 1) // 2 > number)
    return identity_of(_prime(number - second * (second - 1) // 2), _prime(second))


@cache
def _prime(index: int) -> int:
    """With its two highest bits set, so that a product of two has twice as many; not 1 modulo the exponent."""
    start = random.Random(index).getrandbits(_PRIME_BITS) | 3 << (_PRIME_BITS - 2)
    if index < len(_DISTANCES):
        return start + _DISTANCES[index]
    import sympy  # which takes most of a second

    while (prime := int(sympy.nextprime(start))) % _EXPONENT == 1:
        start = prime
    return prime
