"""Reader of LoRA adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.files import LocalFiles
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object, shown
from swarm_protocol.untrusted.numbers import Expected, require_finite, require_number
from swarm_protocol.untrusted.patterns import Pattern
from swarm_protocol.wire.adapters import Adapter, LowRank

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"\.lora_([AB])\.weight$")
_NAME = re.compile(r"[\w.-]+")
MAX_CONFIG_BYTES = 4 << 20
MAX_PATTERNS, MAX_EXPRESSIONS = 4096, 64  # because each module is matched against each of them

_RANK, _ALPHA = Expected(1, 1 << 16, whole=True), Expected(0, 1e6, above=True)
_NUMBERS: dict[str, tuple[float, Expected]] = {  # each with PEFT's default
    "r": (8, _RANK),
    "lora_alpha": (8, _ALPHA),
    "lora_dropout": (0.0, Expected(0, 1, below=True)),
}
_MAY_BE_NULL = ("lora_dropout",)

_SCALED = "which scales weights by their magnitude: expected plain LoRA"
_BASE = "which changes the model's own weights: expected true, false, gaussian, eva or orthogonal"
# Config keys that make an adapter more than low-rank matrices beside linear layers, each with the reason for refusal.
_REFUSED: dict[str, str] = {
    "use_dora": _SCALED,
    "use_qalora": "which pools the inputs: expected plain LoRA",
    "use_bdlora": "whose matrices are block-diagonal: expected plain LoRA",
    "lora_bias": "which trains biases: expected plain LoRA",
    "modules_to_save": "which trains whole modules: expected plain LoRA",
    "trainable_token_indices": "which trains embeddings: expected plain LoRA",
    "target_parameters": "which adapts parameters that are no linear layers, such as fused experts",
    "layer_replication": "which repeats blocks: expected the model as it is",
    "alora_invocation_tokens": "which acts after certain tokens only: expected plain LoRA",
    "arrow_config": "which combines several adapters: expected plain LoRA",
    "kasa_config": "which changes the model's own weights: expected plain LoRA",
    "monteclora_config": "which samples its matrices: expected plain LoRA",
}
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")  # init_lora_weights that keep the base model


def read_adapter(directory: Path, family: Family) -> Adapter:
    """Return the adapter in ``directory`` for a model of this family, in fp32 and with an empty salt.

    Raises:
        CheckpointError: the adapter cannot be read, or has more than low-rank matrices inside blocks.
    """
    config = read_config(directory)
    _require_low_rank(config, directory)
    alphas = _matchers(config.get("alpha_pattern") or {}, directory)
    parts = []
    for module, pair in _read_matrices(directory, family).items():
        block = family.block_index(module + ".")
        assert block is not None  # ``_read_matrices`` has checked it
        _require_product(module, pair, directory)
        rank = pair["A"].shape[0]  # rank_pattern can change the rank of a module
        alpha = next((value for _, matches, value in alphas if matches(module)), config.get("lora_alpha", 8))
        parts.append(
            LowRank(
                block,
                family.name_in_block(module + ".").removesuffix("."),
                alpha / (sqrt(rank) if config.get("use_rslora") else rank),  # as in PEFT's LoraLayer.update_layer
                pair["A"],
                pair["B"],
                float(config.get("lora_dropout") or 0.0),
            )
        )
    if not parts:
        raise CheckpointError(f"adapter {directory} has no tensors")
    return Adapter(b"", tuple(sorted(parts, key=lambda part: (part.block, part.module))))


def _read_matrices(directory: Path, family: Family) -> dict[str, dict[str, torch.Tensor]]:
    """Return the matrices of each module inside blocks in fp32, by "A" and "B"; refuse all other tensors."""
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    lists: set[str] = set()  # prefixes of lists of blocks, which vision towers have, too
    for key, stored in read_header(LocalFiles(directory).path(WEIGHTS_NAME)).items():
        match = _MATRIX.search(key)
        if match is None:
            raise CheckpointError(f"adapter {directory} has a tensor {key!r}: expected lora_A and lora_B of modules")
        block = family.block_index(key)
        if block is None:
            raise CheckpointError(
                f"adapter {directory} changes {_module(key)!r}, which is not inside the model's blocks: "
                "servers hold nothing else"
            )
        lists.add(key.partition(f"{family.blocks}.{block}.")[0])
        if len(lists) > 1:
            raise CheckpointError(
                f"adapter {directory} changes blocks of {' and of '.join(map(repr, sorted(lists)))}: servers hold only "
                "those of the language model"
            )
        if len(stored.shape) != 2 or not all(stored.shape):
            raise CheckpointError(f"adapter {directory} has a tensor {key!r} of shape {list(stored.shape)}: no matrix")
        matrices.setdefault(_module(key), {})[match[1]] = stored.read().float()
    return matrices


def _require_product(module: str, pair: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Raise CheckpointError unless a module's matrices can be multiplied and are finite."""
    if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
        raise CheckpointError(f"adapter {directory} has no lora_A and lora_B of one rank for {module!r}")
    if not all(bool(torch.isfinite(matrix).all()) for matrix in pair.values()):
        raise CheckpointError(f"adapter {directory} is not finite (it contains NaN or infinity) in {module!r}")


def read_config(directory: Path) -> Mapping[str, Any]:
    """Read adapter_config.json of a LoRA adapter and check its numbers; its regular expressions are not run.

    Raises:
        CheckpointError: the file is missing, is of another type, or has numbers that make no sense.
    """
    path = LocalFiles(directory).path(CONFIG_NAME)
    config = read_object(path, MAX_CONFIG_BYTES)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"adapter {directory} is of PEFT's type {shown(config.get('peft_type'))}: expected LORA")
    require_finite(config, path)
    for name, (default, expected) in _NUMBERS.items():
        value = config.get(name, default)
        require_number(default if value is None and name in _MAY_BE_NULL else value, expected, path, name)
    for name, expected in (("rank_pattern", _RANK), ("alpha_pattern", _ALPHA)):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{path} has {name}={shown(patterns)}: expected an object of names and numbers")
        for key, value in patterns.items():
            require_number(value, expected, path, f"{name}[{shown(key)}]")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise CheckpointError(f"{path} has use_rslora={shown(config['use_rslora'])}: expected true or false")
    return config


def adapted_modules(tensor_names: Iterable[str]) -> list[str]:
    """Return the sorted names, as in the model, of the modules that have low-rank matrices among these tensors."""
    return sorted({_module(name) for name in tensor_names if _MATRIX.search(name)})


def require_names(value: object, directory: Path, option: str) -> None:
    """Raise CheckpointError unless an option that PEFT turns into expressions is a name, a list of names, or None."""
    names = value if isinstance(value, list) else [value] if value is not None else []
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(f"adapter {directory} has {option} {shown(name)}: expected names of modules")


def named_patterns(patterns: Mapping[str, Any], modules: Iterable[str], directory: Path) -> dict[str, Any]:
    """Return ``rank_pattern`` or ``alpha_pattern`` for these modules, without expressions on which ``re`` could hang.

    Keys that are names stay. Every other key becomes an expression that lists the modules that it matches.

    Raises:
        CheckpointError: a key cannot be matched in linear time.
    """
    modules, named = list(modules), {}
    for key, matches, value in _matchers(patterns, directory):
        if _NAME.fullmatch(key):
            named[key] = value
        elif meant := [re.escape(module) for module in modules if matches(module)]:
            named[f"^(?:{'|'.join(meant)})"] = value
    return named


def _matchers(patterns: Mapping[str, Any], directory: Path) -> list[tuple[str, Callable[[str], object], Any]]:
    """Return each key, a function that returns whether the key matches a module's name, and the key's value."""
    if len(patterns) > MAX_PATTERNS or sum(_NAME.fullmatch(key) is None for key in patterns) > MAX_EXPRESSIONS:
        raise CheckpointError(
            f"adapter {directory} has too many patterns: expected at most {MAX_PATTERNS}, "
            f"of which {MAX_EXPRESSIONS} are no names"
        )
    return [(key, _matcher(key, directory), value) for key, value in patterns.items()]


def _matcher(key: str, directory: Path) -> Callable[[str], object]:
    """Return a matcher with the result of PEFT's ``get_pattern_key``, but in linear time."""
    whole = rf"(.*\.)?({key})$"
    if _NAME.fullmatch(key):
        return re.compile(whole).match  # a plain name causes no exponential backtracking
    try:
        return Pattern(whole).match
    except ValueError as error:
        raise CheckpointError(f"adapter {directory} has a pattern {shown(key)} that cannot be used: {error}") from None


def _require_low_rank(config: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError if the adapter is more than low-rank matrices beside linear layers."""
    for name, why in _REFUSED.items():
        if config.get(name):
            raise CheckpointError(f"adapter {directory} uses {name}, {why}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"adapter {directory} trains biases (bias={shown(config['bias'])}): expected 'none'")
    if config.get("init_lora_weights") not in _BEGINNINGS:
        raise CheckpointError(
            f"adapter {directory} has init_lora_weights={shown(config['init_lora_weights'])}, {_BASE}"
        )


def _module(key: str) -> str:
    """Return the module's name in the model to which the adapter was added."""
    return _MATRIX.sub("", key).removeprefix(_PREFIX)
