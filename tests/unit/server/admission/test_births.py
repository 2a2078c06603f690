"""The order of sessions by age, as it is for clients whose requests travel for different times."""

from __future__ import annotations

from random import Random

import pytest

from swarm_server.admission.births import Births


def test_sessions_of_a_burst_are_in_the_order_in_which_their_client_asked() -> None:
    """However late each request comes; of different clients, the ages count."""
    chance, births, clock = Random(0), Births(), {"a": 1e6, "b": -300.0}
    asked = [(client, second / 100) for second in range(50) for client in "ab"]
    arrivals = sorted((second + 1.0 + chance.random(), client, second) for client, second in asked)
    found = {
        (client, second): births.born_s(client, arrived_s, 1.0, clock[client] + second)
        for arrived_s, client, second in arrivals
    }
    for client in "ab":
        own = [second for name, second in sorted(found, key=found.__getitem__) if name == client]
        assert own == [second / 100 for second in range(50)]
    assert all(abs(born_s - second) < 1.0 + 1e-6 for (_, second), born_s in found.items())


def test_a_client_that_says_nothing_of_its_clock_is_as_old_as_it_says() -> None:
    assert Births().born_s("a", 10.0, 3.0, 0.0) == 7.0


@pytest.mark.parametrize("asked_s", [float("nan"), float("inf"), 1e300])
def test_a_clock_cannot_make_a_session_much_older_than_the_client_says(asked_s: float) -> None:
    births = Births()
    assert births.born_s("a", 10.0, 3.0, 50.0) == pytest.approx(7.0)
    assert births.born_s("a", 10.0, 3.0, 46.0) == pytest.approx(3.0)  # the first request may have travelled so long
    assert births.born_s("a", 10.0, 3.0, 20.0) == pytest.approx(7.0)
    assert births.born_s("a", 10.0, 3.0, asked_s) == pytest.approx(7.0)


def test_clocks_of_few_clients_are_kept() -> None:
    births = Births()
    for number in range(2000):
        births.born_s(str(number), 1.0, 0.0, 1.0)
    assert len(births._offsets) <= 1024
