"""Building models through transformers, whose switches are process-wide."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.hollow_model import load_whole_model
from tests.gguf_files import write_gguf
from tests.zoo import SUPPORTED, make_config, save_checkpoint


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_a_whole_model_computes_what_transformers_makes_of_its_files(format, tmp_path):
    path, options = tmp_path, {}
    if format == "gguf":
        pytest.importorskip("gguf", reason="needs gguf: pip install 'swarm-lm[gguf]'")
        path, options = tmp_path / "tiny.gguf", {"gguf_file": "tiny.gguf"}
        write_gguf(path, type="Q8_0")
    else:
        save_checkpoint("mixtral", tmp_path)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        found = load_whole_model(ModelCheckpoint.open(path))(ids).logits
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options).eval()(ids).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_threads_that_describe_models_at_once_leave_initialisation_switched_on():
    # Other vocabularies than elsewhere, so that no family is known already.
    configs = [make_config(name, vocab_size=131 + turn) for turn in range(2) for name in list(SUPPORTED)[:12]]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(describe, configs))
    weight = AutoModel.from_config(make_config("llama")).get_input_embeddings().weight
    assert 0.15 < weight.std() < 0.25  # the zoo's initializer_range is 0.2


# A server's process: what torch has in Python for the meta device has not run until a model needs it.
PUT_OFF = """
import json
from swarm_protocol.imports.light_imports import META_OPERATIONS, import_transformers
import_transformers()
import torch
from torch import nn
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_protocol.imports.late_modules import has_run
drawn = torch.randn(3, generator=torch.Generator().manual_seed(5)).tolist()
seen = [has_run(META_OPERATIONS)]
with hf_loader(), torch.device("meta"):
    shape = nn.Conv1d(3, 4, kernel_size=2)(torch.empty(1, 3, 9)).shape
    seen.append(has_run(META_OPERATIONS))
    try:
        torch.empty(2) @ torch.empty(3)
    except RuntimeError:
        seen.append("refused")
print(json.dumps([drawn, list(shape), seen]))
"""


def test_operations_on_the_meta_device_that_were_put_off_are_there_when_a_model_needs_one():
    result = subprocess.run([sys.executable, "-c", PUT_OFF], capture_output=True, text=True, check=True)
    drawn, shape, seen = json.loads(result.stdout)
    assert drawn == torch.randn(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert shape == [1, 4, 8]
    assert seen == [False, True, "refused"]
