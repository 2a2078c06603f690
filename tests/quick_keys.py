"""RSA keys that take no time: any two of a few primes make one. A real key takes a twentieth of a second or more."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

_EXPONENT, _BITS = 65537, 2048
_generated = rsa.generate_private_key


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
        numbers = _generated(public_exponent=_EXPONENT, key_size=_BITS).private_numbers()
        for prime in (numbers.p, numbers.q):
            yield from zip(primes, itertools.repeat(prime))
            primes.append(prime)


class KeyMaker:
    """What tests have in place of the function that generates keys. Its keys are unlike each other, and no secrets."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pairs, self._lock = pairs_of_primes(), threading.Lock()

    def __call__(self, public_exponent: int, key_size: int, backend: Any = None) -> rsa.RSAPrivateKey:
        if (public_exponent, key_size) != (_EXPONENT, _BITS):
            return _generated(public_exponent, key_size, backend)
        with self._lock:
            pair = next(self._pairs)
        return key_of(*pair)


def make_keys_quickly() -> None:
    rsa.generate_private_key = KeyMaker()
