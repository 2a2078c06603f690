"""A fuzzer of a server under attack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from swarm_client.core import background
from swarm_protocol.net.tls import pinned_channel
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from tests.attack.attacked import Attacked
from tests.attack.fuzzing.files import Files
from tests.attack.fuzzing.fuzzer import Fuzzer
from tests.attack.fuzzing.honest_requests import HonestRequests
from tests.swarm.raw_client import own_credentials
from tests.zoo import HIDDEN


@contextmanager
def fuzzer_of(target: Attacked, seed: int) -> Iterator[Fuzzer]:
    """To be run on the background loop."""
    record = target.attacker.record
    options = [*{**dict(CLIENT_OPTIONS), "grpc.max_send_message_length": -1}.items()]
    connecting = pinned_channel(own_credentials(), record.addresses[0], record.tls_fingerprint, options)
    channel = background.run(connecting)
    with TemporaryDirectory() as directory:
        fuzzer = Fuzzer(seed, HonestRequests(record, HIDDEN), channel, target.blocks, Files(Path(directory)))
        try:
            yield fuzzer
        finally:
            background.run(channel.close())


def fuzz(target: Attacked, seed: int, num_messages: int) -> Fuzzer:
    """So many messages of all kinds; the fuzzer says what came of them."""
    with fuzzer_of(target, seed) as fuzzer:
        background.run(fuzzer.run(num_messages))
    return fuzzer
