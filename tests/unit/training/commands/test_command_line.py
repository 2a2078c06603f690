"""``swarm train``: mistakes end in a sentence; what reaches the run is what was asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm_cli import entry
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.net import identity as identity_module
from swarm_training import command_line, volunteering
from swarm_training.commands import joining as joining_module
from swarm_training.commands import watching
from swarm_training.contract.backend import Backend, Joining, PeerAddress
from swarm_training.contract.views import HeldOutView, PeerView, RunView
from swarm_training.core.config import RollbackPolicy
from swarm_training.data.order import DataShard
from swarm_training.ledger.archive import Archive
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.ledger.orders import Ban, GoBack, Orders
from swarm_training.pb.training_ledger_pb2 import SignedByPeer
from swarm_training.reports.scalars import scalars_of
from swarm_training.runfile.reading import read_run_file
from tests.quick_keys import new_identity
from tests.unit.training.ledger.members import ADA, signed_rounds
from tests.unit.training.ledger.members import ORGANISER as MEMBERS
from tests.unit.training.ledger.test_ledger import a_round, round_of
from tests.unit.training.ledger.test_ledger import entry as contribution
from tests.unit.training.reports.test_reporters import Kept

PEER = "/ip4/127.0.0.1/tcp/1234/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ORGANISER = OrganiserKey.generate()
IDENTITY = new_identity()


class Network:
    """What reaches it."""

    def __init__(self) -> None:
        self.orders: list[tuple[Joining, bytes]] = []
        self.looks: list[Joining] = []
        self.seen = RunView("my-run", 312, None, 0, 1024, None, 0, 0, (PeerView("QmA", "", 0, 1.0),), rollbacks=1)

    @contextmanager
    def look(self, who: Joining) -> Iterator[object]:
        self.looks.append(who)
        yield lambda: self.seen

    def backend(self) -> Backend:
        def open_run(*_arguments: object) -> None:
            raise AssertionError("it is not to be opened")

        def read_ledger(who: Joining) -> Ledger:
            self.looks.append(who)
            return a_ledger()

        return Backend(open_run, self.look, lambda who, data: self.orders.append((who, data)), read_ledger)


def a_ledger() -> Ledger:
    ledger = Ledger("run", LedgerLimits(1000), MEMBERS.public)
    for step, samples in ((1, 100), (2, 200)):
        ledger.add(a_round(step, samples, 50))
    return ledger


def failing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(argv, Network().backend())
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return exit_.value.code, error


def run_file(directory: Path, organiser: bool = False) -> Path:
    path = directory / "RUN.toml"
    command_line.main(["init", str(path)], Network().backend())
    path.write_text(
        path.read_text()
        .replace('# codec = "fp32"', 'codec = "int8"')
        .replace("# patience = 10", "patience = 5")
        .replace("# max_norm = 0.0", "max_norm = 0.5")
        .replace("# average_decay = 0.0", "average_decay = 0.75")
    )
    if organiser:
        text = path.read_text().replace('# organiser = ""', f'organiser = "{ORGANISER.public}"')
        path.write_text(text)
    return path


def membership(directory: Path, role: Role) -> Path:
    now = time.time()
    grant = Grant.new(ORGANISER.public, role, "ada", IDENTITY.peer_id, now - 10, now + 1000)
    path = directory / f"{role}.membership"
    MemberCredentials(grant, grant.signed(ORGANISER), IDENTITY).write(path)
    return path


def test_init_writes_an_example_and_then_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path)
    assert f"wrote {path}" in capsys.readouterr().out
    command_line.main(["init", str(path)], Network().backend())
    assert capsys.readouterr().out.splitlines() == [
        f"{path} is right: run my-run with 1024 samples a step",
        "model: 'gpt2' is no directory here, so peers look for it on the hub; this check does not",
        "data: 'texts' is no directory here, so peers look for it on the hub; this check does not",
    ]
    path.write_text(path.read_text().replace("[data]", "[dta]"))
    code, error = failing(["init", str(path)], capsys)
    assert code == 2 and error.startswith(f"error: {path}: the file has an unknown table 'dta': expected run, model")
    code, error = failing(["init", str(tmp_path / "none" / "RUN.toml")], capsys)
    assert code == 1 and error.startswith("error: cannot write") and error.endswith("No such file or directory\n")


def test_init_says_which_data_and_models_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path)
    example = path.read_text()
    capsys.readouterr()
    texts, empty = tmp_path / "texts.txt", tmp_path / "empty"
    texts.write_text("a line\n")
    empty.mkdir()

    def checked(source: object, model: object) -> tuple[int, str]:
        path.write_text(example.replace('"texts"', f'"{source}"').replace('"gpt2"', f'"{model}"'))
        return failing(["init", str(path)], capsys)

    for source, model, message in (
        ("no.txt", DEFAULT_MODEL, "[data] source = 'no.txt': there is no such file or directory"),
        ("/no/texts", DEFAULT_MODEL, "[data] source = '/no/texts': there is no such file or directory"),
        (empty, DEFAULT_MODEL, f"{empty} has no files of text in it: expected some .txt or .jsonl"),
        (path, DEFAULT_MODEL, f"{path} is no file of text: expected .txt or .jsonl"),
        (texts, "/no/model", "/no/model does not exist"),
    ):
        assert checked(source, model) == (2, f"error: {path}: {message}\n")
    path.write_text(example.replace('"texts"', f'"{texts}"').replace('"gpt2"', f'"{DEFAULT_MODEL}"'))
    command_line.main(["init", str(path)], Network().backend())
    assert capsys.readouterr().out == f"{path} is right: run my-run with 1024 samples a step\n"


def test_mistakes_end_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, private = str(run_file(tmp_path)), tmp_path / "private"
    private.mkdir()
    with_organiser, trainer = str(run_file(private, organiser=True)), str(membership(tmp_path, Role.TRAINER))
    for argv, reason in (
        (["join", str(tmp_path / "no.toml")], "cannot read the run file"),
        (["join", path, "--batch-size", "0"], "--batch-size is '0': expected auto, or at least 1"),
        (["join", path, "--part", "3/2"], "--part is '3/2': expected K/N"),
        (["join", path, "--initial-peers", "nobody"], "nobody"),
        (["join", path, "--membership", trainer], "is for a run with an organiser"),
        (["join", with_organiser], "the run takes only members: ask its organiser, and give --membership FILE"),
        (["watch", path], "--initial-peers is missing"),
        (
            ["join", path, "--report", "tensorboard"],
            "--report is 'tensorboard': expected tensorboard:DIR or wandb:PROJECT",
        ),
        (
            ["watch", path, "--initial-peers", PEER, "--report", "csv:x"],
            "--report is 'csv:x': expected tensorboard:DIR",
        ),
        (
            ["watch", path, "--initial-peers", PEER, "--interval", "nan"],
            "--interval is nan: expected a number",
        ),
        (["ledger", path], "--initial-peers or --file: expected members of the run to ask"),
        (["ledger", path, "--initial-peers", PEER, "--file", path], "--initial-peers or --file: expected"),
        (["ledger", with_organiser, "--initial-peers", PEER], "the run takes only members"),
        (["moderate", "ban", path, "QmEve"], "names no organiser under [tokens]"),
        (["moderate", "ban", with_organiser, "QmEve"], "--initial-peers is missing"),
        (["moderate", "rollback", path, "--to-step", "3"], "names no organiser under [tokens]"),
        (["moderate", "rollback", with_organiser, "--to-step", "3"], "--initial-peers is missing"),
        (
            ["moderate", "rollback", with_organiser, "--to-step", "-1", "--initial-peers", PEER],
            "--to-step is -1: expected the number of a step, at least 0",
        ),
        (
            ["moderate", "ban", with_organiser, "QmEve", "--initial-peers", PEER, "--membership", trainer],
            "the membership is for the role trainer: expected moderator",
        ),
        (
            ["moderate", "ban", with_organiser, "QmEve", "--initial-peers", PEER, "--hours", "0"],
            "--hours is 0: expected a number above 0",
        ),
    ):
        code, error = failing(argv, capsys)
        assert code == 2 and error.startswith("error: ") and reason in error and error.count("\n") == 1, error
    with pytest.raises(SystemExit):
        command_line.main(["moderate", "rollback", with_organiser], Network().backend())
    assert "the following arguments are required: --to-step" in capsys.readouterr().err


def test_a_run_is_joined_as_the_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(identity_module, "_LOCK_WAIT_S", 0.0)
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(joining_module, "prepare", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(joining_module, "take_part", lambda *_arguments: None)
    path, member = run_file(tmp_path, organiser=True), membership(tmp_path, Role.TRAINER)
    argv = ["join", str(path), "--initial-peers", PEER, "--membership", str(member), "--batch-size", "512"]
    command_line.main([*argv, "--part", "2/5", "--device", "cpu"], Network().backend())
    file, who, part, device, *_ = calls[0]
    assert (file.batch.size, part, device) == (512, DataShard(1, 5), "cpu")
    assert (who.run, who.target_batch_size, who.initial_peers) == ("my-run", 1024, (PEER,))
    assert (who.organiser, who.identity.peer_id) == (ORGANISER.public, IDENTITY.peer_id)
    assert (who.config.codec, who.power_sgd_rank, who.error_feedback) == ("int8", 0, False)
    assert (who.config.checkpoint_every, who.config.rollback, who.config.max_norm) == (
        100,
        RollbackPolicy(patience=5),
        0.5,
    )
    assert who.config.average_decay == 0.75
    assert Grant.parse(who.token).name == "ada" and str(who.token) not in repr(who)
    again = ["join", str(path), "--membership", str(member), "--batch-size", "auto"]
    assert "is in use by another process of this machine" in failing(again, capsys)[1]
    who.identity.lock.close()
    where = ["--host", "192.0.2.1", "--port", "1", "--dht-port", "2", "--announce-host", "home.example"]
    command_line.main([*again, "--memory", "1GiB", *where], Network().backend())
    assert (who.address, who.client_mode) == (PeerAddress(), False)
    assert calls[1][1].address == PeerAddress("192.0.2.1", 1, 2, "home.example") and not calls[1][1].client_mode
    calls[1][1].identity.lock.close()
    command_line.main([*again, "--initial-peers", PEER, "--client-mode"], Network().backend())
    assert calls[2][1].address == PeerAddress() and calls[2][1].client_mode
    assert calls[1][-1] == 1 << 30 and calls[0][-1] is None
    assert calls[1][0] == read_run_file(path) and calls[1][1].initial_peers == () and calls[1][2] is None


def test_a_membership_is_free_again_after_an_error_that_a_notebook_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "_LOCK_WAIT_S", 0.0)
    wrong_data = Mock(side_effect=ValueError("there are no such data"))
    monkeypatch.setattr(volunteering, "prepare", wrong_data)
    path, member = run_file(tmp_path, organiser=True), membership(tmp_path, Role.TRAINER)
    kept = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no such data") as caught:
            volunteering.volunteer(path, [PEER], membership=member)
        kept.append(caught)


def test_an_order_is_signed_by_a_moderator_and_valid(tmp_path: Path) -> None:
    path, member = run_file(tmp_path, organiser=True), membership(tmp_path, Role.MODERATOR)
    network, known = Network(), Orders("my-run", AccessControl(ORGANISER.public))
    common = ["--initial-peers", PEER, "--membership", str(member)]
    ban = ["moderate", "ban", str(path), "QmEve", "--hours", "2", "--reason", "sends noise", *common]
    command_line.main(ban, network.backend())
    (order,) = (known.take(data) for _, data in network.orders)
    assert order.action == Ban("QmEve", "sends noise") and order.expires_at - order.issued_at == 7200
    assert network.orders[0][0].initial_peers == (PEER,)


def test_a_rollback_is_ordered_for_the_run_as_it_is_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, member = run_file(tmp_path, organiser=True), membership(tmp_path, Role.MODERATOR)
    network, known = Network(), Orders("my-run", AccessControl(ORGANISER.public))
    argv = ["moderate", "rollback", str(path), "--initial-peers", PEER, "--membership", str(member), "--to-step"]
    command_line.main([*argv, "300"], network.backend())
    (order,) = (known.take(data) for _, data in network.orders)
    assert order.action == GoBack(300, 1)
    said = capsys.readouterr().out
    assert "at step 312, has received the order to go back" in said and "up to 300" in said
    for wrong, reason in (("312", "--to-step is 312: expected less than 312"), ("5", "no peer trains run my-run")):
        if wrong == "5":
            network.seen = replace(network.seen, peers=())
        with pytest.raises(SystemExit, match="1"):
            command_line.main([*argv, wrong], network.backend())
        assert reason in capsys.readouterr().err
    assert len(network.orders) == 1


def test_a_run_is_watched_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    network, place, texts = Network(), Kept(), []

    def watch(
        look: Callable[[], RunView], *options: object, also: list[Callable[[RunView], None]], **named: bool
    ) -> None:
        calls.append((look(), *options, named))
        also[0](look())

    monkeypatch.setattr(watching, "watch", watch)
    monkeypatch.setattr(command_line, "parse_report", lambda text: texts.append(text) or (lambda _run: place))
    argv = ["watch", str(run_file(tmp_path)), "--initial-peers", PEER, "--json", "--interval", "5"]
    command_line.main([*argv, "--report", "wandb:us"], network.backend())
    ((view, *options),) = calls
    assert options == [5.0, {"json_lines": True, "in_terminal": True}] and network.looks[0].initial_peers == (PEER,)
    assert view == replace(network.seen, learning_rate=view.learning_rate, checkpoint=300)
    assert texts == ["wandb:us"] and place.is_closed
    assert place.added == [(312, scalars_of(view))]


def test_a_ledger_is_summed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, path = Network(), str(run_file(tmp_path))
    held_out = {"held_out": HeldOutView(300, 2.75), "best_held_out": HeldOutView(200, 2.625)}
    network.seen = replace(network.seen, loss=2.5, **held_out)
    capsys.readouterr()
    command_line.main(["ledger", path, "--initial-peers", PEER], network.backend())
    text = capsys.readouterr().out
    assert "run run: 400 samples in 2 rounds" in text and network.looks[0].initial_peers == (PEER,)
    assert "run my-run   step 312   rollbacks 1   loss 2.5000" in text
    assert "loss on held-out data 2.7500 at step 300, lowest 2.6250 at step 200" in text
    assert re.search(r"ada .* 300 .* 75.0% .* 2", text) and text.index("ada") < text.index("bob")
    command_line.main(["ledger", path, "--initial-peers", PEER, "--json"], network.backend())
    assert json.loads(capsys.readouterr().out) == {
        "run": "run",
        "samples": 400,
        "rounds": 2,
        "users": [
            {"user": "ada", "samples": 300, "share": 0.75, "rounds": 2},
            {"user": "bob", "samples": 100, "share": 0.25, "rounds": 2},
        ],
        "step": 312,
        "loss": 2.5,
        "held_out": {"step": 300, "loss": 2.75},
        "best_held_out": {"step": 200, "loss": 2.625},
    }


def test_a_ledger_in_a_file_is_summed_from_what_is_valid_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Who has changed a line has not signed it: the checksum is no protection against that."""
    path = run_file(tmp_path, organiser=True)
    path.write_text(path.read_text().replace(str(ORGANISER.public), str(MEMBERS.public)).replace("my-run", "run"))
    archive = Archive(tmp_path / "run.ledger")
    forged = SignedByPeer.FromString(a_round(3))
    forged.content = forged.content.replace(b"run", b"run", 1)[:-1] + b"\x33"
    for data in (
        *signed_rounds(a_ledger()),
        forged.SerializeToString(),
        round_of(contribution(ADA, 1, run="x"), run="x"),
    ):
        archive.append(data)
    capsys.readouterr()
    command_line.main(["ledger", str(path), "--file", str(archive.path), "--json"], Network().backend())
    assert [user["samples"] for user in json.loads(capsys.readouterr().out)["users"]] == [300, 100]
    assert "a round is left out" in caplog.text


def test_mistakes_are_found_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text("[run]\nname = 3")
    code = f"""
import sys
from swarm_cli.entry import main
for argv in (["init", "{tmp_path}/RUN.toml"], ["join", "{tmp_path}/no.toml"], ["join", "{tmp_path}/RUN.toml"]):
    sys.argv = ["swarm", "train", *argv]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2
print(*[name for name in ("torch", "transformers", "hivemind", "datasets") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n" and done.stderr.count("error: ") == 3


def test_grants_of_a_run_are_those_of_private_swarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ORGANISER.save(tmp_path / "organiser.key")
    argv = ["--key", str(tmp_path / "organiser.key"), "--role", "moderator", "--name", "mo", "--days", "1"]
    monkeypatch.setattr(
        sys, "argv", ["swarm", "train", "moderate", "grant", *argv, "--out", str(tmp_path / "mo.membership")]
    )
    entry.main()
    credentials = MemberCredentials.read(tmp_path / "mo.membership", {})
    credentials.require(Role.MODERATOR, ORGANISER.public)
    assert capsys.readouterr().out == f"{tmp_path / 'mo.membership'}\n"
