"""The check of ``swarm train init``: whether the model and data that a run file names are on this machine."""

from __future__ import annotations

from pathlib import Path

from swarm_models.checkpoints.default_model import check_location, locate
from swarm_training.data.sources import local_texts
from swarm_training.runfile.settings import RunFile


def not_here(file: RunFile) -> list[str]:
    """Return a sentence for each name in the file of something that is not on this machine, but may be on the hub.

    Raises ValueError if there can be no such data, model or tokenizer.
    """
    model = file.model
    named = {"tokenizer": model.tokenizer}
    if not model.preset:
        named["model"] = model.name_or_path
    found = []
    for what, name in named.items():
        if name:
            check_location(located := locate(name))
            found += [] if Path(located).expanduser().is_dir() else [_on_the_hub(what, name)]
    found += _data_not_here("data", "[data]", file.data.source)
    require_held_out(file)
    if file.evaluation.every:
        found += _data_not_here("held-out data", "[evaluation]", file.evaluation.source)
    return found


def require_held_out(file: RunFile) -> None:
    """Raise ValueError if a file of the data for evaluation is also one of the data for training."""
    sources = (file.data.source, file.evaluation.source) if file.evaluation.every else ()
    files = [{path.resolve() for path in local_texts(Path(source).expanduser())} for source in sources]
    if files and (both := sorted(set.intersection(*files))):
        raise ValueError(
            f"[evaluation] source = {file.evaluation.source!r}: {both[0]} is among the files of [data] too: expected "
            "other data, on which nobody trains"
        )


def _data_not_here(what: str, table: str, source: str) -> list[str]:
    path = Path(source).expanduser()
    if path.exists():
        local_texts(path)
        return []
    if path.suffix or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1:
        raise ValueError(f"{table} source = {source!r}: there is no such file or directory")
    return [_on_the_hub(what, source)]


def _on_the_hub(what: str, name: str) -> str:
    return f"{what}: {name!r} is no directory here, so peers look for it on the hub; this check does not"
