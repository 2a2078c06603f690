"""Identities for tests: any two of a few primes make a key. A real key takes a twentieth of a second or more."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric import rsa

from swarm_protocol.net.hivemind_parts import RSAPrivateKey
from swarm_protocol.net.identity import Identity

_EXPONENT, _BITS = 65537, 2048


def key_of(p: int, q: int) -> rsa.RSAPrivateKey:
    """The key that is made of these primes."""
    private = pow(_EXPONENT, -1, (p - 1) * (q - 1))
    numbers = rsa.RSAPrivateNumbers(
        *(p, q, private, private % (p - 1), private % (q - 1), rsa.rsa_crt_iqmp(p, q)),
        rsa.RSAPublicNumbers(_EXPONENT, p * q),
    )
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)  # which takes longer than to make it


def pairs_of_primes() -> Iterator[tuple[int, int]]:
    """No pair comes twice, and of n primes n * (n - 1) / 2 are made. They are others in each process."""
    primes: list[int] = []
    while True:
        numbers = rsa.generate_private_key(public_exponent=_EXPONENT, key_size=_BITS).private_numbers()
        for prime in (numbers.p, numbers.q):
            yield from zip(primes, itertools.repeat(prime))
            primes.append(prime)


def identity_of(p: int, q: int) -> Identity:
    """Whose key is made of these primes."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = key_of(p, q)
    return Identity(key)


class IdentityMaker:
    """Makes identities that are unlike each other, and unlike those of other processes. Their keys are no secrets."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pairs, self._lock = pairs_of_primes(), threading.Lock()

    def __call__(self) -> Identity:
        with self._lock:
            pair = next(self._pairs)
        return identity_of(*pair)


new_identity = IdentityMaker()  # what tests call, where users have ``Identity.generate``
