"""Callbacks of the Trainer, without a model."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from swarm_cli.finetune.trainer import Interrupt


@pytest.fixture
def sigint() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_asks_a_run_to_end_unless_the_run_is_in_the_background_of_a_shell(sigint: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert not interrupt.asked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
