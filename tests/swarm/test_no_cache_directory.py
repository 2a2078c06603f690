"""Home and cache directories that cannot be written: servers and clients work without them, and say so once."""

from __future__ import annotations

from swarm_cli.demo.local_cluster import LocalCluster
from tests.marks import SLOW
from tests.swarm.test_command_line import run


@SLOW
def test_a_swarm_without_a_home(tmp_path):
    place = tmp_path / "file"
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
