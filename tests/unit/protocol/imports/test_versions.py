"""Installed packages are compared with what this package requires, and a refusal names an untested transformers."""

from __future__ import annotations

from importlib import metadata

import pytest
import transformers

from swarm_models.checkpoints.describing import describe
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.imports import versions
from tests.zoo import make_config


def test_installed_versions_that_meet_their_requirements() -> None:
    required = ["torch>=2", "transformers>=5,<6", "missing>=1; extra == 'serve'", "missing>=1; python_version < '3'"]
    installed = {"torch": metadata.version("torch"), "transformers": transformers.__version__}
    assert versions.installed_versions(required) == (installed, [])


def test_one_sentence_for_each_requirement_that_is_not_met() -> None:
    found, wrong = versions.installed_versions(["torch>=1", "transformers>=99,<100", "no-such-package>=1"])
    assert wrong == [f"transformers is {transformers.__version__}, expected <100,>=99", "no-such-package is missing"]
    assert sorted(found) == ["torch", "transformers"]


@pytest.fixture
def requires(monkeypatch: pytest.MonkeyPatch):
    def required(*lines: str) -> None:
        monkeypatch.setattr(versions, "required_packages", lambda: list(lines))

    return required


def test_a_transformers_in_the_range_was_tested(requires) -> None:
    requires("transformers>=5,<6", "torch>=99")
    assert versions.untested_transformers() is None


def test_nothing_is_said_where_only_the_source_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTION", "no-such-package")
    assert versions.untested_transformers() is None


def test_a_refusal_names_the_untested_transformers(requires) -> None:
    requires("torch>=2", "transformers>=99,<100")
    said = f"swarm-lm: transformers is {transformers.__version__}, expected <100,>=99"
    with pytest.raises(UnsupportedModel, match=said):
        describe(make_config("recurrent_gemma"))


def test_a_refusal_does_not_blame_a_tested_transformers(requires) -> None:
    requires("transformers>=5,<6")
    with pytest.raises(UnsupportedModel) as refusal:
        describe(make_config("recurrent_gemma"))
    assert "tested" not in str(refusal.value)
