"""Threads of servers that share a machine: never more than its cores, whoever comes, goes or is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_server.machine import cores
from swarm_server.machine.cores import CoreShare, cpu_quota, fair_threads, physical_cores
from tests.unit.support import TIMEOUT_S

TWO, THREE, FOUR = {0, 1}, {0, 1, 2}, {0, 1, 2, 3}
core_sets = st.sets(st.integers(0, 9), min_size=1)


@pytest.fixture(autouse=True)
def no_quota(monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: math.inf)


@pytest.mark.parametrize(
    ("mine", "others", "threads"),
    [
        pytest.param(FOUR, [], 4, id="alone"),
        pytest.param(FOUR, [FOUR], 2, id="half"),
        pytest.param(TWO, [TWO, TWO], 1, id="at-least-one"),
        pytest.param(THREE, [THREE], 1, id="rounded-down"),
        pytest.param(FOUR, [{2, 3}], 3, id="partly-shared"),
        pytest.param({2, 3}, [FOUR], 1, id="all-shared-partly"),
        pytest.param(FOUR, [{4, 5}, {6}], 4, id="apart"),
        pytest.param({0, 1, 2, 3, 4, 5}, [{0, 1, 2}, {0, 1, 2}, {3}], 3, id="thirds-are-exact"),
    ],
)
def test_fair_threads(mine, others, threads):
    assert fair_threads(mine, others) == threads


def test_earlier_server_gets_the_core_that_is_left():
    assert [fair_threads(THREE, [THREE], earlier) for earlier in (0, 1)] == [2, 1]
    assert [fair_threads(set(range(8)), [set(range(8))] * 2, earlier) for earlier in (0, 1, 2)] == [3, 3, 2]
    # one that came between, with other cores, does not count
    assert fair_threads(THREE, [{7}, THREE], 1) == 2


@given(st.lists(core_sets, min_size=1, max_size=6))
def test_servers_never_outnumber_their_cores(servers):
    threads = [fair_threads(mine, servers[:index] + servers[index + 1 :], index) for index, mine in enumerate(servers)]
    assert all(1 <= count <= len(mine) for count, mine in zip(threads, servers, strict=True))
    # whose share is less than a core gets one all the same
    assert sum(count for count in threads if count > 1) <= len(set().union(*servers))


@given(core_sets, st.integers(1, 12))
def test_equal_servers_use_every_core(mine, count):
    threads = [fair_threads(mine, [mine] * (count - 1), index) for index in range(count)]
    assert sum(threads) == max(len(mine), count)
    assert max(threads) - min(threads) <= 1 and threads == sorted(threads, reverse=True)


def share(directory: Path, mine: set[int], **environment: str) -> CoreShare:
    return CoreShare(directory, mine, environment)


def test_servers_that_come_and_go(tmp_path):
    with share(tmp_path, FOUR) as first:
        assert first.threads() == 4
        with share(tmp_path, FOUR) as second:
            assert (first.threads(), second.threads()) == (2, 2)
            with share(tmp_path, FOUR) as third:
                assert (first.threads(), second.threads(), third.threads()) == (2, 1, 1)
            assert (first.threads(), second.threads()) == (2, 2)
        assert first.threads() == 4
    assert not list(tmp_path.glob("*.json"))


def test_omp_num_threads_wins_and_leaves_the_rest_to_others(tmp_path):
    with share(tmp_path, FOUR, OMP_NUM_THREADS="1") as first, share(tmp_path, FOUR) as second:
        assert (first.threads(), second.threads()) == (1, 3)
        with share(tmp_path, FOUR, OMP_NUM_THREADS="2,1") as third:
            # on the cores that one server uses, not on the one that two do
            assert (first.threads(), second.threads(), third.threads()) == (1, 2, 2)
    with share(tmp_path, TWO, OMP_NUM_THREADS="8") as many:
        assert many.threads() == 8
    for nonsense in ("", "all", "0", "-1"):
        with share(tmp_path, TWO, OMP_NUM_THREADS=nonsense) as other:
            assert other.threads() == 2


def test_quota_limits_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.5)
    with share(tmp_path, FOUR) as first:
        assert first.threads() == 2
        with share(tmp_path, FOUR) as second:  # another container, or the same: the free cores come first
            assert (first.threads(), second.threads()) == (2, 2)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 0.5)
    with share(tmp_path, FOUR) as small:
        assert small.threads() == 1


OTHER_PROCESS = """
import sys
from pathlib import Path
from swarm_server.machine.cores import CoreShare

with CoreShare(Path(sys.argv[1]), {0, 1}, {}) as share:
    print(share.threads(), flush=True)
    sys.stdin.read()
"""


def test_killed_server_counts_no_more(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline()
        with share(tmp_path, TWO) as mine:
            assert mine.threads() == 1
            other.send_signal(signal.SIGKILL)
            other.wait(TIMEOUT_S)
            assert mine.threads() == 2
            assert len(list(tmp_path.glob("*.json"))) == 1  # what it left is tidied up
    finally:
        other.kill()
        other.communicate()


def test_servers_of_other_machines_that_share_the_directory_do_not_count(tmp_path, monkeypatch):
    with share(tmp_path, TWO) as here:
        monkeypatch.setattr(cores, "boot_id", lambda: "another machine")
        with share(tmp_path, TWO) as there:
            assert there.threads() == 2
            monkeypatch.undo()
            assert here.threads() == 2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize("siblings", ["{},{}\n", "{}-{}\n"])
def test_hyperthreads_of_a_core_are_one(tmp_path, name, siblings):
    for cpu in range(4):
        write(tmp_path / f"cpu{cpu}" / "topology" / name, siblings.format(cpu // 2 * 2, cpu // 2 * 2 + 1))
    assert physical_cores({0, 1, 2, 3}, tmp_path) == {0, 2}
    assert physical_cores({1, 3}, tmp_path) == {0, 2}  # the same cores as another server's 0 and 2
    assert physical_cores({2, 3}, tmp_path) == {2}


def test_cpus_of_unknown_cores_are_cores(tmp_path):
    assert physical_cores({3, 5}, tmp_path) == {3, 5}
    assert physical_cores(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        pytest.param("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "max 100000"}, math.inf, id="v2-without"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3, id="v2-of-parent"),
        pytest.param("0::/", {"cpu.max": "200000 100000"}, 2, id="v2-container"),
        pytest.param("0::/out/side", {"cpu.max": "200000 100000"}, 2, id="v2-name-from-outside"),
        pytest.param(
            "5:cpu,cpuacct:/a\n0::/",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            0.5,
            id="v1",
        ),
        pytest.param(
            "1:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            math.inf,
            id="v1-without",
        ),
        pytest.param("3:cpuset:/a", {"cpuset/a/cpu.max": "1 1"}, math.inf, id="not-of-the-cpu"),
        pytest.param("0::/a", {}, math.inf, id="nothing-there"),
    ],
)
def test_quota_of_control_groups(tmp_path, own, files, quota):
    write(tmp_path / "own", own + "\n")
    for name, text in files.items():
        write(tmp_path / "root" / name, text + "\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == quota


def test_without_control_groups(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path) == math.inf
    assert cpu_quota() > 0


@pytest.mark.parametrize("place", ["/proc/nowhere", "file"])
def test_without_a_directory_a_server_takes_its_cores_as_if_it_were_alone(place, tmp_path, caplog):
    (tmp_path / "file").touch()
    with share(tmp_path / place / "cores", FOUR) as alone:
        assert alone.threads() == 4
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("servers of this machine will not share its cores as they should: ")
