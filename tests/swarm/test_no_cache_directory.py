"""Home and cache directories that cannot be written: servers and clients work without them, and say so once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swarm_cli.demo.local_cluster import LocalCluster
from tests.marks import SLOW
from tests.swarm.test_command_line import run


@pytest.fixture
def full_disk(tmp_path) -> Iterator[Path]:
    place = tmp_path / "full"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here, which needs root")
    try:
        with suppress(OSError), open(place / "all", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@SLOW
@pytest.mark.parametrize("home", ["file", "full"])
def test_a_swarm_without_a_home(home, tmp_path, request):
    place = request.getfixturevalue("full_disk") if home == "full" else tmp_path / home
    if home == "file":
        place.touch()
    environment = {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), "HF_HOME": str(place / "hf")}
    with LocalCluster(environment) as cluster:
        server = cluster.start("--blocks", "0:20", "--throughput", "100")
        cluster.wait_ready([server])
        peer = server.ready["peer"]
        given = run("generate", "Return a", "--max-new-tokens", "4", "--initial-peers", peer, cache="", **environment)
        words = server.stderr.read_text()
        alone = run("status", cache="", **environment)
    assert (given.returncode, given.stderr) == (0, "blocks 0:20 cannot be checked: no second server has them\n")
    assert alone.returncode == 1
    assert alone.stderr.startswith("error: no swarm named 'default' runs on this machine")
    assert "Traceback" not in words
    assert words.count("servers of this machine will not share its cores") == 1
    assert words.count("others of this machine will not find this server") == 1
