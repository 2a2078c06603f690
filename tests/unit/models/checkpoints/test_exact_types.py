"""The page of families says what a trial of every type gave, and the README says as much."""

from __future__ import annotations

import re

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.exact_types import PAGE, listed, render, why_not
from tests.marks import always
from tests.splitting import Swarm
from tests.zoo import MODEL_TYPES, REJECTED

AGAIN = "run `python -m tests.exact_types`"
README = PAGE.parents[2] / "README.md"


def test_the_page_lists_every_type_of_its_version() -> None:
    if f"with transformers {transformers.__version__}:" not in PAGE.read_text():
        pytest.skip(f"the page is not of transformers {transformers.__version__}")
    assert set(listed()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), AGAIN


def test_the_page_agrees_with_the_zoo() -> None:
    exact = {name for name, is_exact in listed().items() if is_exact}
    assert MODEL_TYPES - set(REJECTED) <= exact, AGAIN
    assert not exact & set(REJECTED), AGAIN
    assert set(re.findall(r"\*\*(\w+)\*\*", PAGE.read_text())) == MODEL_TYPES - set(REJECTED), AGAIN


def test_the_readme_has_the_number_of_exact_types_and_names_some() -> None:
    exact = {name for name, is_exact in listed().items() if is_exact}
    number, names = re.search(r"(\d+) types of models are exact, among them (.*?):", README.read_text(), re.S).groups()
    assert int(number) == len(exact)
    assert set(re.split(r",\s+|\s+and\s+", names)) <= exact


def test_what_is_rendered_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    page = tmp_path / "families.md"
    page.write_text(render({"llama": None, "t5": "too deep", "arcee": None, "bart": "too deep", "zaya": "too wide"}))
    monkeypatch.setattr("tests.exact_types.PAGE", page)
    assert listed() == {"llama": True, "arcee": True, "t5": False, "bart": False, "zaya": False}


# Windows beside convolutions; queries scaled by position; a view of what attention gives after a crop.
@pytest.mark.parametrize("model_type", always("ministral3", among=["ministral3", "inkling_text", "beam", "afmoe"]))
def test_a_type_that_the_zoo_has_not_is_exact(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    assert why_not(model_type) is None


def test_a_refusal_and_a_difference_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("gemma3n") == "its blocks share keys, values or embeddings with one another"
    in_order = Swarm.chain
    monkeypatch.setattr(Swarm, "chain", lambda swarm, *spans: in_order(swarm, *reversed(spans)))
    with pytest.raises(AssertionError, match="without a cache"):
        why_not("ministral3")
