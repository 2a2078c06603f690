"""One server is attacked by all these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.attacked import Attacked, attacked


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(tmp_path_factory.mktemp("attacked")) as target:
        yield target


@pytest.fixture
def target(running: Attacked) -> Iterator[Attacked]:
    with running.while_an_honest_client_generates():
        yield running
