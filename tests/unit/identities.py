"""Identities that are the same in every run, since who leads depends on peer ids. Their keys are no secrets."""

from __future__ import annotations

import itertools
import random
from functools import cache

import sympy
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm_protocol.net.hivemind_parts import RSAPrivateKey
from swarm_protocol.net.identity import Identity

_EXPONENT = 65537
_PRIME_BITS = 1024


@cache
def identity(number: int) -> Identity:
    """Of a pair of primes: few of those, which take long to find, make many identities."""
    second = next(index for index in itertools.count(1) if index * (index + 1) // 2 > number)
    return identity_of(_prime(number - second * (second - 1) // 2), _prime(second))


def identity_of(p: int, q: int) -> Identity:
    """Whose key is made of these primes."""
    private = pow(_EXPONENT, -1, (p - 1) * (q - 1))
    numbers = rsa.RSAPrivateNumbers(
        *(p, q, private, private % (p - 1), private % (q - 1), rsa.rsa_crt_iqmp(p, q)),
        rsa.RSAPublicNumbers(_EXPONENT, p * q),
    )
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = numbers.private_key(unsafe_skip_rsa_key_validation=True)  # which takes longer than to make it
    return Identity(key)


@cache
def _prime(index: int) -> int:
    """With its two highest bits set, so that a product of two has twice as many; not 1 modulo the exponent."""
    start = random.Random(index).getrandbits(_PRIME_BITS) | 3 << (_PRIME_BITS - 2)
    while (prime := int(sympy.nextprime(start))) % _EXPONENT == 1:
        start = prime
    return prime
