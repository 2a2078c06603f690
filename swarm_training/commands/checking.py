"""The check of ``swarm train init``: whether the model and data that a run file names are on this machine."""

from __future__ import annotations

from pathlib import Path

from swarm_models.checkpoints.default_model import check_location, locate
from swarm_training.data.sources import local_texts
from swarm_training.runfile.settings import RunFile


def not_here(file: RunFile) -> list[str]:
    """Return a sentence for each name of the file that stands for nothing on this machine, but may on the hub.

    Raises ValueError if there can be no such data, model or tokenizer.
    """
    data, model = file.data.source, file.model
    named = {"tokenizer": model.tokenizer}
    if not model.preset:
        named["model"] = model.name_or_path
    found = []
    for what, name in named.items():
        if name:
            check_location(located := locate(name))
            found += [] if Path(located).expanduser().is_dir() else [_on_the_hub(what, name)]
    path = Path(data).expanduser()
    if path.exists():
        local_texts(path)
        return found
    if path.suffix or data.startswith(("/", "./", "../", "~")) or data.count("/") > 1:
        raise ValueError(f"[data] source = {data!r}: there is no such file or directory")
    return [*found, _on_the_hub("data", data)]


def _on_the_hub(what: str, name: str) -> str:
    return f"{what}: {name!r} is no directory here, so peers look for it on the hub, where it was not looked for now"
