"""A small Llama, a text and a run file; and what one process, with the stock model, makes of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from swarm_training.runfile.reading import read_run_file
from swarm_training.stages.commands.building import build, build_micro_batches, stage_source, training_config
from swarm_training.stages.engine.accumulator import rounded

TOKENIZER = Path(__file__).parents[3] / "swarm_models" / "shipped" / "tiny-python-docs"
CHECKPOINT_EVERY = 4  # steps
TEXT = """
[run]
name = "crew"
target_batch_size = 8
checkpoint_every = {checkpoint_every}
checkpoints = ""
[model]
name_or_path = "{model}"
tokenizer = "{tokenizer}"
[data]
source = "{source}"
block_length = 16
[optimizer]
name = "adamw"
lr = 1e-2
schedule = "linear"
warmup_steps = 2
total_steps = 200
[stages]
count = {count}
micro_batch_size = 1
sums = "{sums}"
activations = "{wire}"
gradients = "{wire}"
audit_share = {audit_share}
"""


def write_run(
    directory: Path,
    count: int,
    wire: str = "fp64",
    sums: str = "fp64",
    checkpoint_every: int = CHECKPOINT_EVERY,
    audit_share: float = 0.0,
) -> Path:
    """The run file. Embeddings are not tied: in the stock model the gradients of both uses are added in fp32 before
    anybody can round them."""
    config = LlamaConfig(
        vocab_size=_vocabulary(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory / "model")
    source = directory / "text.txt"
    source.write_text("\n".join(f"The square of {number} is {number * number}." for number in range(400)))
    file = directory / "RUN.toml"
    file.write_text(
        TEXT.format(
            checkpoint_every=checkpoint_every,
            model=directory / "model",
            tokenizer=TOKENIZER,
            source=source,
            count=count,
            wire=wire,
            sums=sums,
            audit_share=audit_share,
        )
    )
    return file


def _vocabulary() -> int:
    from swarm_training.commands.building import build_tokenizer
    from swarm_training.runfile.settings import ModelSettings

    return len(build_tokenizer(ModelSettings(preset="tiny", tokenizer=str(TOKENIZER))))


def one_process(run_file: Path, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters of the stock model after so many steps, and the loss of each; gradients are rounded and added up
    as sums in fp64 are."""
    file = read_run_file(run_file)
    source, config, data = stage_source(file), training_config(file), build_micro_batches(file)
    model = AutoModelForCausalLM.from_config(source.config)
    for index in range(file.stages.count):
        model.load_state_dict(build(file, source, index, config).stage.state(), strict=False)
    parameters = dict(model.eval().named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1.0, weight_decay=file.optimizer.weight_decay)
    losses = []
    for step in range(steps):
        sums = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in parameters.items()}
        loss_sum = num_tokens = 0
        for number in range(data.count):
            content = data.at(step, number)
            logits = model(content.ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            labels = content.labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
            gradients = torch.autograd.grad(loss / data.loss_scale, list(parameters.values()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += rounded(gradient)
            loss_sum, num_tokens = loss_sum + float(loss.detach()), num_tokens + len(labels)
        for name, each in parameters.items():
            each.grad = (sums[name] / data.count).float()
        for group in optimizer.param_groups:
            group["lr"] = file.optimizer.rate(step)
        optimizer.step()
        losses.append(loss_sum / num_tokens)
    return parameters, losses


def assert_equal(directory: Path, expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
