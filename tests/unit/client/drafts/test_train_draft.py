"""The script that distils drafts, on a tiny model: it learns, measures rightly, and names what is wrong."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from swarm_client.drafts.distilled.draft import DistilledDraft, load_distilled
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.marks import SLOW
from tests.zoo import save_checkpoint

EXAMPLES = Path(__file__).parents[4] / "examples"
FEW = ("--local", "--tokens", "1024", "--blocks", "1", "--every-s", "1000")


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_draft")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint("llama", directory, num_hidden_layers=2)
    return directory


@SLOW
def test_a_draft_is_made_and_the_same_again(script, tiny, tmp_path, capsys):
    for name in ("one", "two"):
        script.main([str(tiny), *FEW, "--steps", "2", "--out", str(tmp_path / name)])
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    printed = capsys.readouterr().out
    assert "a draft for tiny" in printed
    last = float(re.findall(r"step 2 \(100%\), loss [\d.]+: ([\d.]+) of guesses", printed)[-1])
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert load_distilled(tmp_path / "one", model).acceptance == last


@SLOW
def test_it_learns_what_the_model_says(script, tiny):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    args = script.parse_arguments([str(tiny), *FEW])
    ids = torch.randint(3, 128, (4, 16)).repeat_interleave(16, dim=1)
    rows = script.Rows(ids, script.collected.__globals__["features_of"](model, ids))
    distillation = script.Distillation(model, script.new_network(model, args))

    def loss() -> float:
        torch.manual_seed(1)  # the same prompts
        with torch.no_grad():
            return distillation.loss(rows, 2).item()

    before, (first, in_a_row) = loss(), distillation.accepted(rows)
    for _ in range(20):
        distillation.step(rows, 2, 4e-3)
    assert loss() < before - 0.3
    assert distillation.accepted(rows)[0] > first and distillation.accepted(rows)[1] > in_a_row


@torch.no_grad()
def test_guesses_in_training_are_those_of_the_draft(script, tiny):
    """The outputs at each distance from what is confirmed, all at once, are those of sessions at every position."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    args = script.parse_arguments([str(tiny), *FEW, "--blocks", "2"])
    network = script.new_network(model, args).eval()
    torch.nn.init.normal_(network.join.weight, std=0.2)  # features count
    ids, hidden = torch.randint(3, 128, (12,)), torch.randn(12, 64)
    draft = DistilledDraft(network, model.get_input_embeddings(), model.get_output_embeddings(), "", 0.5)
    outputs = script.unrolled(network, F.embedding(ids[None], draft.embedding.weight), hidden[None], 4)
    logits = [draft.head(output)[0] for output in outputs]
    for confirmed in range(1, 9):
        session = draft.begin()
        session.confirm(ids[:confirmed].tolist(), hidden[:confirmed])
        guessed = [session.start(1), *(session.step(ids[None, confirmed + i])[0] for i in range(3))]
        for step, expected in enumerate(guessed):
            torch.testing.assert_close(logits[step][confirmed - 1 + step], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens is 0: expected at least 1"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--text", "nowhere.txt"], "--text nowhere.txt does not exist"),
        (["--out", "no/where/draft"], "its folder does not exist"),
        (["--local", "--swarm", "other"], "--local asks no swarm"),
    ],
)
def test_wrong_arguments_are_named(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        script.main([DEFAULT_MODEL, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_files_are_named(script, tiny, tmp_path):
    with pytest.raises(SystemExit, match=r"^train_draft.py: .*nowhere does not exist"):
        script.main([str(tmp_path / "nowhere"), *FEW])
    short, data = tmp_path / "short.txt", tmp_path / "data.pt"
    short.write_text("Too short.")
    with pytest.raises(SystemExit, match="--text has 4 tokens: expected at least 1024"):
        script.main([DEFAULT_MODEL, *FEW, "--text", str(short), "--out", str(tmp_path / "out")])
    for content in (b"", b"no data"):
        data.write_bytes(content)
        with pytest.raises(SystemExit, match="is no file of an earlier run"):
            script.main([str(tiny), *FEW, "--data", str(data), "--out", str(tmp_path / "out")])
    torch.save([(torch.zeros(4, 256, dtype=torch.long), torch.zeros(4, 256, 7))], data)
    with pytest.raises(SystemExit, match="is no file of an earlier run for this model"):
        script.main([str(tiny), *FEW, "--data", str(data), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
