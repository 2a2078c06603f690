"""Every benchmark once, small: it runs to its end, and writes the rows that it promises. Most take minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from network_lab import NoLab, require_lab

ROOT = Path(__file__).parents[2]
COLUMNS = {"name", "measured", "beside", "ratio", "target", "met"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_quick(script: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """What ``benchmarks/SCRIPT --quick`` writes, its rows by name."""
    file = directory / "results.json"
    command = [sys.executable, f"benchmarks/{script}", "--quick", *arguments, "--json", str(file)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert file.exists(), result.stdout + result.stderr
    results = json.loads(file.read_text())
    assert all(set(row) >= COLUMNS for row in results["rows"]), results["rows"]
    rows = {row["name"]: row for row in results["rows"]}
    assert len(rows) == len(results["rows"]) > 0
    return results | {"rows": rows, "exit code": result.returncode, "output": result.stdout + result.stderr}


@pytest.mark.long
def test_chaos_generations_survive_a_little_of_every_fault(tmp_path: Path) -> None:
    results = run_quick("chaos.py", tmp_path)
    assert results["exit code"] == 0, results["output"]
    assert results["tally"]["num_tokens"] > 0
    assert all(results[section] for section in ("kills", "standby", "hangs", "rates", "leave"))


@pytest.mark.long
def test_load_nobody_notices_that_others_vanish_or_cancel(tmp_path: Path) -> None:
    results = run_quick("load.py", tmp_path, "--models", str(tmp_path))
    failed = {name: row["found"] for name, row in results["rows"].items() if row["met"] == "no"}
    assert failed == {} and results["exit code"] == 0, results["output"]


def test_gpu_report_goes_on_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    first = run_quick("gpu_report.py", tmp_path, "--models", str(tmp_path), "--parts", "limits", "steps")
    assert first["exit code"] == 0, first["output"]
    assert first["rows"]["step, 4 rows, 16 positions"]["measured"] > 0
    parts = "limits", "steps", "formats", "profile"
    both = run_quick("gpu_report.py", tmp_path, "--models", str(tmp_path), "--parts", *parts)
    assert both["exit code"] == 0, both["output"]
    assert both["parts"]["steps"] == first["parts"]["steps"]
    assert {"none: prefill, 64 positions", "int8: step, 4 rows, 16 positions", "fp8 is refused"} <= both["rows"].keys()
    (profile,) = both["parts"]["profile"]["rows"]
    assert any("/swarm_" in line for line in profile["functions"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "names"),
    [
        (
            "engine.py",
            [
                *("decode-1-int8", "decode-16-int8", "context", "prefill-fp32", "memory", "start", "hop", "chat"),
                *("prefix", "crowd-64", "crowd-256", "group-decode-1-int8", "group-decode-8-int8"),
            ],
        ),
        (
            "gateway.py",
            [
                *(f"{streams} streams, tokens/s beside transformers serve" for streams in (1, 8)),
                "client's processor time, ms/token at 16 streams",
            ],
        ),
        (
            "finetune.py",
            [f"swarm {q}, {name}" for q in ("fp32", "int8") for name in ("frozen", "LoRA", "deep prompts")],
        ),
    ],
)
def test_every_row_is_measured(script: str, names: list[str], tmp_path: Path) -> None:
    results = run_quick(script, tmp_path, "--models", str(tmp_path))
    assert results["exit code"] == 0, results["output"]
    assert {*names} <= results["rows"].keys()
    assert all(row["measured"] > 0 for name, row in results["rows"].items() if name != "hop")


def test_quality_of_four_and_eight_bits_beside_float32(tmp_path: Path) -> None:
    results = run_quick("quality.py", tmp_path, "--formats", "compressed-tensors")
    assert results["exit code"] == 0, results["output"]
    rows = results["rows"]
    for form in ("as it is", "compressed-tensors"):
        assert rows[f"{form}, int8: perplexity"]["ratio"] < rows[f"{form}, int4: perplexity"]["ratio"] + 0.01
        assert rows[f"{form}, int4: bits per weight"]["measured"] < 5.3  # the scales of a small model weigh more
        assert 0.5 < rows[f"{form}, int4: greedy tokens that agree"]["measured"] <= 1
    # its integers are kept, and its scales rounded
    kept, rounded = (rows[f"{form}, int4: perplexity"]["ratio"] for form in ("compressed-tensors", "as it is"))
    assert kept < rounded


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("routing.py", "slower than the best chain, at most"),
        pytest.param("simulate_swarm.py", "10 servers, gaps opened by moves", marks=pytest.mark.long),
    ],
)
def test_targets_are_met(script: str, name: str, tmp_path: Path) -> None:
    results = run_quick(script, tmp_path)
    assert results["exit code"] == 0, results["output"]
    assert results["rows"][name]["met"] == "yes"


@pytest.mark.long
@pytest.mark.parametrize("links", [[], ["--netlab"]], ids=["counted", "real"])
def test_square_cube_shows_that_larger_models_wait_less(links: list[str], tmp_path: Path) -> None:
    results = run_quick("square_cube.py", tmp_path, *links)
    assert results["exit code"] == 0, results["output"]
    for variant in ("none, fp32", "bottleneck:4, int8"):
        name = f"hidden {{}}, {variant}, 100 Mbit/s: share of time on the wire"
        shares = [results["rows"][name.format(hidden)]["measured"] for hidden in (256, 1024, 4096)]
        assert shares == sorted(shares, reverse=True), variant


@pytest.mark.long
def test_attack_measures_what_an_honest_client_loses(tmp_path: Path) -> None:
    results = run_quick("attack.py", tmp_path)
    assert "very many empty changes" in results["rows"] and "a few hundred fuzzed messages" in results["rows"]
    problems = {name: row["problems"] for name, row in results["rows"].items() if row["problems"]}
    assert problems == {}, results["output"]  # how long the client waited is for quiet machines
    assert all(row["generations"] and row["peak_bytes"] for row in results["rows"].values())


@pytest.mark.long
def test_fuzz_finds_nothing_and_repeats_a_case(tmp_path: Path) -> None:
    results = run_quick("fuzz.py", tmp_path)
    assert results["exit code"] == 0, results["output"]
    assert results["rows"]["Session"]["messages"] > 100
    assert {"wrong answers", "tracebacks", "not as before"} <= results["rows"].keys()
    again = run_quick("fuzz.py", tmp_path, "--only", "7")
    assert again["exit code"] == 0 and " beside " in again["output"], again["output"]


@pytest.mark.long
def test_network_measures_bytes_and_loss_by_codec(tmp_path: Path) -> None:
    try:
        require_lab()
    except NoLab as error:
        pytest.skip(str(error))
    results = run_quick("network.py", tmp_path, "--links", "1 Gbit, 5 ms", "10 Mbit, 100 ms")
    assert results["exit code"] == 0, results["output"]
    rows = results["rows"]
    assert {f"loss of the shipped model, {name}" for name in ("raw", "bf16", "int8", "int4")} <= rows.keys()
    slow = {codec: rows[f"10 Mbit, 100 ms, {codec}, 4 rows: tokens/s"] for codec in ("raw", "auto")}
    assert slow["raw"]["codecs"] == ["raw"] * 3 and slow["auto"]["codecs"] != ["raw"] * 3
    assert slow["auto"]["bytes_per_token"] < slow["raw"]["bytes_per_token"]
    assert rows["10 Mbit, 100 ms, auto, one row, a draft of 0.8: tokens/s"]["beside"] is not None
