"""``swarm server --train`` and ``swarm train`` of runs in stages: mistakes end in a sentence, the rest arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.codecs.bitmap import to_bits
from swarm_server import command_line as server
from swarm_training import command_line as train
from swarm_training.commands import watching
from swarm_training.commands.staged import StagesBackend
from swarm_training.contract.backend import Backend, Joining, PeerAddress
from swarm_training.contract.views import HeldOutView, RunView
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Progress
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.stages import front
from swarm_training.stages.commands import serving
from swarm_training.stages.commands.inference import Afterwards
from swarm_training.stages.commands.looking import view_of
from swarm_training.stages.placement.spans import costs_of, spans_of_stages
from tests.unit.training.ledger.members import ORGANISER
from tests.unit.training.ledger.test_ledger import a_round
from tests.unit.training.stages.commands.test_command_line import PEER, TEXT

PEERS = ["--initial-peers", PEER]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Its length alone matters here.
    monkeypatch.setattr("swarm_training.stages.commands.building.build_tokenizer", lambda model: [0] * 100)
    path = tmp_path / "RUN.toml"
    path.write_text(TEXT)
    (tmp_path / "WHOLE.toml").write_text(TEXT.partition("[stages]")[0])
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments), **options)
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said and said.startswith("error: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--blocks", "0:2"], "blocks 0:2 are no stage of the run: expected one of 0:1 (stage 0), 1:2 (stage 1)"),
        (["--blocks", "all"], "blocks 'all' are no range of blocks: expected START:END"),
        (["--blocks", "0:1", "--initial-blocks", "0:1"], "--blocks and --initial-blocks: expected one of them"),
        (["--revision", "x", "--max-s", "3"], "--max-sessions and --revision: cannot be combined with --train"),
        (["--quant", "none"], "expected --then-serve DIR with it"),
        (["--then-serve", "model"], "the run has no last step: expected --steps, or total_steps under [optimizer]"),
        (["--no-prefix-cache"], "--prefix-cache: cannot be combined with --train"),
        (["--port", "70000"], "--port is 70000: expected 0 to 65535"),
        (["--announce-address", "here:80"], "--announce-address is 'here:80': expected a host alone"),
        (["--announce-address", "here"], "--announce-address is 'here': expected --dht-port with it"),
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, which nobody can call: expected --announce-address"),
        (["--report", "logs"], "--report is 'logs': expected tensorboard:DIR"),
        (["--device", "abacus"], "device 'abacus' is unknown: expected cpu, cuda"),
        (["--initial-peers", "here"], "here"),
    ],
)
def test_a_server_that_is_to_train_refuses_what_it_cannot_do(
    run_file: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refusal(capsys, server.main, "--train", run_file, *flags, train=front.serve_stage)


def test_a_server_trains_only_in_stages(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_file.replace("RUN", "WHOLE")
    said = refusal(capsys, server.main, "--train", whole, train=front.serve_stage)
    assert "not trained in stages: expected their number as `count` under [stages]" in said
    assert "cannot read the run file" in refusal(capsys, server.main, "--train", whole + "x", train=front.serve_stage)


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("RUN", ["join"], "is of a run in stages: expected --as stage to hold and compute a stage"),
        (
            "RUN",
            ["join", "--as", "trainer"],
            "--initial-peers is missing: expected members of the run, since a trainer",
        ),
        ("RUN", ["join", "--as", "trainer", *PEERS, "--blocks", "0:1"], "--blocks is for --as stage"),
        ("RUN", ["join", "--as", "trainer", *PEERS, "--memory", "1GiB"], "--memory is for --as stage"),
        ("RUN", ["join", "--as", "stage", "--memory", "much"], "size 'much' is not understood"),
        ("RUN", ["join", "--as", "stage", "--part", "1/2"], "--part is not for a run in stages"),
        ("RUN", ["join", "--as", "stage", "--batch-size", "2"], "--batch-size is not for a run in stages"),
        ("RUN", ["join", "--as", "stage", "--client-mode"], "--client-mode is not for a run in stages: trainers call"),
        ("RUN", ["join", "--as", "stage", "--dht-port", "65536"], "--dht-port is 65536: expected 0 to 65535"),
        ("RUN", ["join", "--as", "stage", "--announce-host", "me"], "--announce-host is 'me': expected --dht-port"),
        ("WHOLE", ["join", "--host", "0.0.0.0"], "--host is 0.0.0.0, which nobody can call: expected --announce-host"),
        ("WHOLE", ["join", "--dht-port", "5", "--announce-host", "me:80"], "is 'me:80': expected a host alone"),
        ("WHOLE", ["join", "--dht-port", "5", "--announce-host", "me"], "--announce-host is 'me': expected --host"),
        ("WHOLE", ["join", "--client-mode"], "--client-mode needs --initial-peers: a run is founded by"),
        ("WHOLE", ["join", "--client-mode", *PEERS, "--port", "5"], "expected no address or port with it"),
        ("RUN", ["join", "--as", "trainer", "--host", "::1"], "--host is for --as stage: a trainer holds no part"),
        ("RUN", ["join", "--as", "stage", "--blocks", "1:3"], "expected one of 0:1 (stage 0), 1:2 (stage 1)"),
        ("RUN", ["join", "--as", "stage", "--report", "logs"], "--report is 'logs': expected tensorboard:DIR"),
        ("RUN", ["export", "out"], "--initial-peers is missing"),
        ("RUN", ["watch"], "--initial-peers is missing"),
        ("WHOLE", ["join", "--as", "stage"], "--as is for a run in stages, and "),
        ("WHOLE", ["join", "--blocks", "0:1"], "--blocks is for a run in stages, and "),
        ("WHOLE", ["join", "--memory", "much"], "size 'much' is not understood"),
        ("WHOLE", ["export", "out", *PEERS], "is not of a run in stages: its peers write checkpoints themselves"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(
    run_file: str, capsys: pytest.CaptureFixture[str], name: str, argv: list[str], message: str
) -> None:
    path = run_file.replace("RUN", name)
    assert message in refusal(capsys, train.main, argv[0], path, *argv[1:], stages=lambda: front.STAGES)


def test_what_was_asked_for_is_what_is_served(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    async def serve(file: Any, who: Any, index: Any, say: Any, device: str, **options: Any) -> None:
        asked.append((file.run.name, index, device, options, who.address))

    monkeypatch.setattr(serving, "serve", serve)
    where = PeerAddress("127.0.0.1", 0, 5, "me")
    flags = [
        "--train",
        run_file,
        *["--host", "127.0.0.1", "--dht-port", "5", "--announce-address", "me", "--device", "cpu"],
    ]
    for blocks in ([], ["--blocks", "1:2"], ["--initial-blocks", "0:1"]):
        front.serve_stage(server.parse_args([*flags, *blocks]))()
    ending = Path(run_file).with_name("ENDING.toml")
    ending.write_text(TEXT.replace("[optimizer]", "[optimizer]\ntotal_steps = 5"))
    flags[1] = str(ending)
    front.serve_stage(
        server.parse_args([*flags, "--then-serve", "/models/toy", "--quant", "none", "--memory", "4GiB"])
    )()
    joined = ["join", run_file, "--as", "stage", "--device", "cpu", "--blocks", "0:1"]
    for flags in (["--host", "127.0.0.1", "--dht-port", "5", "--announce-host", "me"], ["--memory", "4GiB"]):
        train.main([*joined, *flags], stages=lambda: front.STAGES)
    memory = {"memory_bytes": 4 << 30, "reports": None}
    nothing = {"afterwards": None, "memory_bytes": None, "reports": None}
    assert asked == [
        ("toy", None, "cpu", {"stays": True, **nothing}, where),
        ("toy", 1, "cpu", {"stays": True, **nothing}, where),
        ("toy", 0, "cpu", {"stays": False, **nothing}, where),
        (
            "toy",
            None,
            "cpu",
            {"stays": True, "afterwards": Afterwards(Path("/models/toy"), 5, "none"), **memory},
            where,
        ),
        ("toy", 0, "cpu", {"memory_bytes": None, "reports": None}, where),
        ("toy", 0, "cpu", memory, PeerAddress()),
    ]


def test_the_last_stage_costs_its_head_too() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=4, vocab_size=2048)
    spans = spans_of_stages(config, 2)
    assert list(map(str, spans)) == ["0:2", "2:4"]
    assert costs_of(config, spans) == [2.0, 2.0 + 64 * 2048 / (4 * 64**2 + 3 * 64 * 256)]


def records() -> list[list[Progress]]:
    def record(peer_id: str, **fields: Any) -> Progress:
        done = fields.pop("done", ())
        common = {"target_batch_size": 3, "samples": len(done), "micro_batches": to_bits(done, 3), "samples_per_s": 2.0}
        return Progress("toy/0", peer_id, step=7, **{**common, **fields})

    first = [record("QmA", done=(0, 2)), record("QmB", done=(1,), decided=b"x", next_stage=1)]
    held_out = {"held_out": HeldOutLoss(Moment(0, 6), 2.5, 4), "best_held_out": HeldOutLoss(Moment(0, 3), 1.5, 4)}
    return [first, [record("QmC", done=(1,), loss=2.0, loss_samples=3, bytes_sent=10, **held_out, has_ended=True)]]


@contextmanager
def look(file: Any, who: Any) -> Iterator[Callable[[], RunView]]:
    assert file.stages.count == 2 and who.initial_peers == (PEER,)
    yield lambda: view_of("toy", 3, records())


def never(*_: object) -> Any:
    raise AssertionError


def test_a_run_in_stages_is_shown() -> None:
    view = view_of("toy", 3, records())
    assert (view.step, view.samples, view.target_batch_size, view.loss, view.next_step_s) == (7, 1, 3, 2.0, 1.0)
    assert [(stage.micro_batches, stage.holds, len(stage.peers)) for stage in view.stages] == [
        (3, True, 2),
        (1, False, 1),
    ]
    assert (view.held_out, view.best_held_out, view.has_ended) == (HeldOutView(6, 2.5), HeldOutView(3, 1.5), True)
    assert view.stages[0].peers[1].next_stage == 1 and view.stages[0].peers[0].micro_batches == 2
    empty = view_of("toy", 3, [records()[0], []])
    assert (empty.step, empty.samples, empty.next_step_s) == (7, 0, None) and empty.stages[1].peers == ()


def test_watch_prints_the_stages(run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", stop)
    monkeypatch.setenv("COLUMNS", "120")
    stages = StagesBackend(never, never, never, look, never)
    train.main(["watch", run_file, *PEERS], stages=lambda: stages)
    text = capsys.readouterr().out
    assert "run toy   step 7   loss 2.0000" in text and "1 of 3 micro-batches (33%), 2 micro-batches/s" in text
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in text.splitlines()]
    assert ["0", "2", "7", "3", "of", "3", "yes", "4"] in lines and ["1", "1", "7", "1", "of", "3", "2"] in lines
    assert ["0", "…QmB", "7", "1", "yes", "2", "1"] in lines
    train.main(["watch", run_file, *PEERS, "--json"], stages=lambda: stages)
    found = json.loads(capsys.readouterr().out)
    assert [stage["micro_batches"] for stage in found["stages"]] == [3, 1]
    assert found["stages"][0]["peers"][1]["holds"] is True


def test_the_configuration_file_may_say_it_and_what_it_says_of_serving_is_passed_over(
    run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[server]\ntrain = "{run_file}"\nquant = "int8"\n[train.join]\nas = "stage"\nblocks = "0:1"\n')
    monkeypatch.setenv("SWARM_CONFIG", str(config))
    args = server.parse_args([])
    assert args.train == Path(run_file)
    server.require_train_flags(["--blocks", "0:1"])
    joined = train.parse_args(["join", run_file], stages=lambda: front.STAGES)
    assert (joined.role, joined.blocks) == ("stage", "0:1")


def test_the_ledger_says_who_has_done_the_work_of_which_stage(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Joining] = []

    def read(who: Joining) -> Ledger:
        asked.append(who)
        ledger = Ledger("run", LedgerLimits(100), ORGANISER.public)  # one round of 50 + 50 for each stage before
        for step in range(1, len(asked)):
            ledger.add(a_round(step, 50, 50))
        return ledger

    backend = Backend(never, never, never, read)
    stages = replace(front.STAGES, look=look)
    train.main(["ledger", run_file, *PEERS], backend, stages=lambda: stages)
    text = capsys.readouterr().out
    assert "run toy   step 7   loss 2.0000" in text and "loss on held-out data 2.5000 at step 6" in text
    assert "stage 0: 0 micro-batches in 0 rounds" in text and "stage 1: 100 micro-batches in 1 rounds" in text
    size = asked[0].target_batch_size
    assert [(who.run, who.target_batch_size) for who in asked] == [("toy/0", size), ("toy/1", size)]
    train.main(["ledger", run_file, *PEERS, "--json"], backend, stages=lambda: stages)
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["loss"], found["held_out"]) == ("toy", 2.0, {"step": 6, "loss": 2.5})
    assert [stage["samples"] for stage in found["stages"]] == [200, 300]


def test_ledgers_in_files_and_rollbacks_are_not_for_runs_in_stages(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "is of a run in stages: expected one whose peers hold the whole model"
    assert message in refusal(capsys, train.main, "ledger", run_file, "--file", "rounds")
