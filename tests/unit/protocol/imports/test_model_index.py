"""What transformers finds out about its models at every start is kept, as long as their sources are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_protocol.imports.model_index import Index, recalled

NOTHING: frozenset[str] = frozenset()
INDEX: Index = {
    "llama": {
        NOTHING: {"configuration_llama": {"LlamaConfig"}},
        frozenset({"torch", "vision"}): {"modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
    },
    "auto": {},
    "deep": {"deeper": {NOTHING: {"modeling": set()}}},
}


class Reader:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, path: str) -> Index:
        self.asked.append(path)
        return INDEX


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "modeling_llama.py").write_text("one = 1\n")
    return tmp_path / "models"


def test_the_second_time_nothing_is_read(models: Path, tmp_path: Path) -> None:
    read = Reader()
    assert recalled(read, str(models), kept_in=tmp_path / "kept") == INDEX
    assert recalled(read, str(models), kept_in=tmp_path / "kept") == INDEX
    assert read.asked == [str(models)]


def other_content(source: Path) -> None:
    """Of the same size; later for the file system, whose clock may tick 250 times per second only."""
    before = source.stat()
    while source.stat().st_ctime_ns == before.st_ctime_ns:
        source.write_text("two = 2\n")


def other_content_of_the_same_time(source: Path) -> None:
    before = source.stat()
    other_content(source)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


def one_more(source: Path) -> None:
    (source.parent / "modeling_more.py").write_text("")


def one_more_model(source: Path) -> None:
    (source.parents[1] / "more").mkdir()
    one_more(source.parents[1] / "more" / "source")


def one_less(source: Path) -> None:
    source.unlink()


@pytest.mark.parametrize(
    "change",
    [other_content, other_content_of_the_same_time, one_more, one_more_model, one_less],
    ids=lambda f: f.__name__,
)
def test_sources_that_have_changed_are_read_again(models: Path, tmp_path: Path, change) -> None:
    read = Reader()
    recalled(read, str(models), kept_in=tmp_path)
    change(models / "llama" / "modeling_llama.py")
    assert recalled(read, str(models), kept_in=tmp_path) == INDEX
    recalled(read, str(models), kept_in=tmp_path)
    assert len(read.asked) == 2


def test_another_reader_reads_again(models: Path, tmp_path: Path) -> None:
    read, code = Reader(), tmp_path / "reader.py"
    for text in ("first", "second one", "second one"):
        if not code.exists() or code.read_text() != text:
            code.write_text(text)
        recalled(read, str(models), [str(code)], tmp_path)
    assert len(read.asked) == 2


@pytest.mark.parametrize(
    "damage", ["", "{}", "[]", '{"signature": 3', '{"signature": "SAME"}', '{"signature": "SAME", "index": [[1]]}']
)
def test_a_damaged_file_is_written_again(models: Path, tmp_path: Path, damage: str) -> None:
    read, file = Reader(), tmp_path / "models.json"
    recalled(read, str(models), kept_in=tmp_path)
    kept = file.read_text()
    file.write_text(damage.replace("SAME", kept.split('"')[3]))
    assert recalled(read, str(models), kept_in=tmp_path) == INDEX
    assert len(read.asked) == 2 and file.read_text() == kept


def test_without_room_for_a_file_it_is_read_every_time(models: Path, tmp_path: Path) -> None:
    read = Reader()
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert recalled(read, str(models), kept_in=tmp_path / "file" / "below") == INDEX
    assert len(read.asked) == 2


def test_what_could_not_be_finished_is_removed(models: Path, tmp_path: Path) -> None:
    read = Reader()
    (tmp_path / "kept" / "models.json").mkdir(parents=True)  # where the file would be
    assert recalled(read, str(models), kept_in=tmp_path / "kept") == INDEX
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["models.json"]


def test_a_link_that_leads_nowhere_is_no_obstacle(models: Path, tmp_path: Path) -> None:
    read = Reader()
    (models / "link").symlink_to(tmp_path / "nowhere")
    assert recalled(read, str(models), kept_in=tmp_path) == INDEX and read.asked == [str(models)]


SCRIPT = """
import sys
from swarm_protocol.imports import model_index
reads = []
make = model_index.recalled
model_index.recalled = lambda read, *rest: make(lambda path: (reads.append(path), read(path))[1], *rest)
model_index.remember_models()
import transformers
from transformers.utils import import_utils
index = import_utils.create_import_structure_from_path
models = next(iter(transformers.__path__)) + "/models"
code = open(import_utils.__file__).read()
fresh = {"__name__": "transformers.utils.fresh", "__file__": import_utils.__file__, "__package__": "transformers.utils"}
exec(compile(code, import_utils.__file__, "exec"), fresh)
print(len(reads), index(models) == fresh["create_import_structure_from_path"](models), len(index(models)) > 100)
from transformers import LlamaForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig
"""


@pytest.mark.slow
def test_the_index_of_transformers_is_what_it_reads_itself(tmp_path: Path) -> None:
    for num_reads in (1, 0):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
        assert result.stdout.split() == [str(num_reads), "True", "True"], result.stderr
