"""Mistakes on the server's command line are found before anything starts, and said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_protocol.span import Span
from swarm_server.command_line import check_files, parse_args, read_config, require_follow_flags, require_members
from swarm_server.core.config import ServerConfig


def config(*argv: str) -> ServerConfig:
    return read_config(parse_args(list(argv)))


def test_defaults_are_those_of_the_config() -> None:
    assert config() == ServerConfig()


def test_every_flag_reaches_the_config() -> None:
    flags = {
        "model": "name/model", "revision": "main", "blocks": "10:20", "quant": "none", "dtype": "bfloat16",
        "device": "cpu", "host": "::", "port": "1", "dht-port": "2", "announce-address": "host:3", "swarm": "mine",
        "identity": "key", "cache-tokens": "4", "throughput": "5.5", "chunk-tokens": "6", "max-sessions": "7",
    }  # fmt: skip
    peers = tuple(
        f"/ip4/192.0.2.{number}/tcp/31337/p2p/QmWuXJM1v3RHh9tF3Sy7Xrrn2zvhDQQpuBLRU7QLR5PaMd" for number in (1, 2)
    )
    argv = [part for name, value in flags.items() for part in (f"--{name}", value)]
    assert config(*argv, "--prefix-cache", "own", "--initial-peers", *peers) == ServerConfig(
        model="name/model", model_revision="main", blocks=Span(10, 20), quant="none", dtype="bfloat16", device="cpu",
        host="::", port=1, dht_port=2, announce_address="host:3", swarm="mine", identity=Path("key"), cache_tokens=4,
        throughput=5.5, chunk_tokens=6, max_sessions=7, prefix_cache="own", initial_peers=peers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num-blocks", "8"], ServerConfig(num_blocks=8)),
        (["--memory", "4GiB"], ServerConfig(memory_bytes=4 << 30)),
        (["--drain-timeout", "2.5"], ServerConfig(drain_timeout_s=2.5)),
        (["--initial-blocks", "3:5"], ServerConfig(initial_blocks=Span(3, 5))),
        (["--balance-margin", "0.2"], ServerConfig(balance_margin=0.2)),
        (["--adapters", "a/poet", "b/cook/"], ServerConfig(adapters=(Path("a/poet"), Path("b/cook")))),
        (["--adapter-memory", "1GiB"], ServerConfig(adapter_bytes=1 << 30)),
        (["--devices", "cuda:0,cuda:1"], ServerConfig(devices=("cuda:0", "cuda:1"))),
        (
            ["--devices", "cuda:0,cuda:1", "--tensor-parallel", "--num-blocks", "1"],
            ServerConfig(devices=("cuda:0", "cuda:1"), tensor_parallel=True, num_blocks=1),
        ),
        (["--no-prefix-cache"], ServerConfig(prefix_cache="none")),
        (["--cache-memory", "1.5GiB"], ServerConfig(cache_bytes=3 << 29)),
        (["--throughput", "auto"], ServerConfig(throughput=None)),
    ],
)
def test_other_flags(argv: list[str], expected: ServerConfig) -> None:
    assert config(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--blocks", "0:2", "--num-blocks", "2"], "blocks and num_blocks are both given: expected one of them"),
        (["--num-blocks", "2", "--memory", "1GiB"], "num_blocks and memory_bytes are both given"),
        (["--num-blocks", "0"], "num_blocks is 0: expected at least 1"),
        (["--memory", "much"], "size 'much' is not understood"),
        (["--prefix-cache", "some"], "prefix cache 'some' is unknown: expected one of auto, all, own, none"),
        (["--drain-timeout", "-1"], "drain_timeout_s is -1.0: expected a number of seconds"),
        (["--balance-margin", "0"], "balance_margin is 0.0: expected a number above 0, such as 0.03"),
        (["--adapters", "a/poet", "b/poet"], r"adapters are called like their directories: \['poet', 'poet'\] are no"),
        (["--devices", "cuda:0,cuda:0"], "devices cuda:0,cuda:0 name one twice: expected each once"),
        (["--devices", "cuda:0,xpu:1"], "devices cuda:0,xpu:1 are of several types: expected one type"),
        (
            ["--devices", "cuda,cuda:1"],
            "device 'cuda' is none of several: expected a type and a number, such as cuda:0",
        ),
        (["--devices", "cuda:0,"], "device '' is none of several"),
        (["--devices", "cuda:0", "--device", "cpu"], "device and devices are both given: expected one of them"),
        (
            ["--devices", "cuda:0,cuda:1", "--blocks", "3:4"],
            "1 blocks cannot be split over 2 devices: expected at least",
        ),
        (["--devices", "cuda:0,cuda:1", "--num-blocks", "1"], "1 blocks cannot be split over 2 devices"),
        (["--tensor-parallel", "--device", "cuda:0"], "tensor_parallel is for several devices: expected 2 to 16"),
        (
            ["--tensor-parallel", "--devices", "cuda:0,cuda:1", "--quant", "nf4"],
            "tensor_parallel computes with int8 or none, not with quant nf4",
        ),
        (["--adapter-memory", "0"], "adapter_bytes is 0: expected at least 1"),
        (["--balance-margin", "nan"], "balance_margin is nan: expected a number above 0"),
        (["--initial-blocks", "3"], "blocks '3' are no range of blocks"),
        (["--initial-blocks", "3:5", "--blocks", "3:5"], "blocks and initial_blocks are both given"),
        (["--blocks", "10:10"], "blocks 10:10 are no range of blocks: expected START:END with 0 <= START < END"),
        (["--blocks", "a:b"], "blocks 'a:b' are no range of blocks: expected START:END, for example 10:20"),
        (["--quant", "int3"], "quantisation 'int3' is unknown: expected one of .*int8"),
        (["--dtype", "int8"], "dtype 'int8' is unknown: expected one of auto, float32, bfloat16, float16"),
        (["--port", "65536"], "port 65536 is no port: expected 0 to 65535"),
        (["--dht-port", "100000"], "dht_port 100000 is no port"),
        (["--throughput", "fast"], "throughput 'fast' is not understood: expected auto or a number"),
        (["--throughput", "0"], "throughput is 0.0: expected a number of tokens per second above 0"),
        (["--throughput", "nan"], "throughput is nan: expected"),
        (["--throughput", "inf"], "throughput is inf: expected"),
        (["--swarm", "a/b"], "swarm name 'a/b' is not usable: expected 1 to 64 letters"),
        (["--cache-tokens", "0"], "cache_tokens is 0: expected at least 1"),
        (["--cache-memory", "0GiB"], "cache_bytes is 0: expected at least 1"),
        (["--chunk-tokens", "0"], "chunk_tokens is 0: expected at least 1"),
        (["--max-sessions", "0"], "max_sessions is 0: expected at least 1"),
        (["--cache-memory", "1GB", "--cache-tokens", "9"], "cache_tokens and cache_bytes are both given: expected one"),
    ],
)
def test_a_wrong_value_says_what_was_expected(argv: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(*argv)


def test_room_outside_the_cache(tmp_path: Path) -> None:
    read = config("--kv-offload-memory", "1GiB", "--kv-offload-disk", "2GiB", "--kv-offload-dir", str(tmp_path))
    sizes = {"kv_offload_memory_bytes": 1 << 30, "kv_offload_disk_bytes": 2 << 30}
    assert read == ServerConfig(**sizes, kv_offload_directory=tmp_path)
    with pytest.raises(ValueError, match="--kv-offload-dir: expected --kv-offload-disk SIZE with it"):
        config("--kv-offload-dir", str(tmp_path))
    with pytest.raises(ValueError, match="kv_offload_disk_bytes is 1000: expected 0 or at least 1048576"):
        config("--kv-offload-disk", "1000")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: expected a directory"):
        config("--kv-offload-disk", "1GiB", "--kv-offload-dir", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--port", "http"], "argument --port: invalid int value: 'http'"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_cannot_be_parsed_ends_with_usage(argv: list[str], reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        config(*argv)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_the_package_that_metrics_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(parse_args(["--metrics-port", "0"]))
    check_files(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"--metrics-port needs one more package: pip install 'swarm-lm\[metrics\]'"):
        check_files(config)


def test_a_follower_takes_only_what_it_needs() -> None:
    argv = ["--follow", "leader:31400", "--group-key", "key", "--model", "m", "--quant", "int4"]
    assert config(*argv) == ServerConfig(model="m", quant="int4", follow="leader:31400", group_key=Path("key"))
    require_follow_flags(argv)
    named = dict(group="lab", group_key=Path("key"))
    assert config("--group", "lab", "--group-key", "key") == ServerConfig(group_size=2, **named)
    assert config("--group", "lab", "--group-key", "key", "--group-size", "3") == ServerConfig(group_size=3, **named)
    argv_of_one = ["--group", "lab", "--group-size", "1"]
    with pytest.raises(ValueError, match="--group-size 1 is no size of a group with a name: expected at least 2"):
        require_members(parse_args(argv_of_one), argv_of_one)
    with pytest.raises(ValueError, match="group name 'a b' is not usable"):
        config("--group", "a b")
    with pytest.raises(ValueError, match=r"--discover and --port: cannot be combined with --follow, which takes only"):
        require_follow_flags([*argv, "--port", "1", "--discover"])
