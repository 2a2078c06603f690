"""Fixtures that start real servers; they wait for readiness, never for a fixed time."""

from __future__ import annotations

import pytest

from tests.swarm.processes import ServerProcess


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """The cache directory of all tests, so that they never meet the user's own swarm."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture
def server_process(tmp_path):
    """Starts ``python -m swarm_server ARGUMENTS``; whatever still runs after the test is ended."""
    started: list[ServerProcess] = []

    def start(*arguments: str, cache=tmp_path, wait: bool = True) -> ServerProcess:
        started.append(ServerProcess(*arguments, cache=cache, wait=wait))
        return started[-1]

    yield start
    for process in started:
        process.__exit__()
