"""Scripts for shells, as the shells themselves read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from swarm_cli.completion import script
from swarm_cli.parsers import SHELLS

BASH = r"""
source "$1"; shift
function=$(complete -p swarm | sed 's/.*-F \([^ ]*\).*/\1/')
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"; [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$line; COMPREPLY=()
    "$function"; echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("scripts")
    paths = {shell: directory / f"swarm.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(script(shell))
    return paths


def needs(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def test_bash_completes_commands_flags_choices_and_files(scripts, tmp_path):
    (tmp_path / "member.key").touch()
    wanted = {
        "swarm st": ["status"],
        "swarm u": ["up"],
        "swarm up --no-b": ["--no-browser"],
        "swarm server --log-f": ["--log-format"],
        "swarm server --log-format ": ["text", "json"],
        "swarm train ": ["init", "join", "export", "watch", "ledger", "moderate"],
        "swarm train join --as ": ["stage", "trainer"],
        "swarm server --tra": ["--train"],
        "swarm keys grant --ro": ["--role"],
        f"swarm chat --membership {tmp_path}/mem": [f"{tmp_path}/member.key"],
        "swarm completion ": list(SHELLS),
    }
    command = [needs("bash"), "-c", BASH, "bash", str(scripts["bash"]), *wanted]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert dict(zip(wanted, map(str.split, result.stdout.splitlines()), strict=True)) == wanted


def test_zsh_takes_it_for_a_completion_of_swarm(scripts):
    shell = needs("zsh")
    subprocess.run([shell, "-n", str(scripts["zsh"])], check=True)
    (scripts["zsh"].parent / "_swarm").write_text(scripts["zsh"].read_text())
    load = f"fpath=({scripts['zsh'].parent} $fpath); autoload -Uz compinit; compinit -u -D; print $_comps[swarm]"
    assert subprocess.run([shell, "-f", "-c", load], capture_output=True, text=True).stdout == "_swarm\n"


def test_fish_completes(scripts):
    ask = f"source {scripts['fish']}; complete -C 'swarm server --log-format '; complete -C 'swarm stat'"
    result = subprocess.run([needs("fish"), "--no-config", "-c", ask], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["text", "json", "status"]
