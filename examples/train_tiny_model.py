"""Train the tiny language model that ships with Swarm, on the documentation that every Python carries.

The text is the language reference in ``pydoc_data.topics`` and the docstrings of the standard library, read from
source without importing it. The model is a Llama of 20 blocks, small enough for a laptop and deep enough to split.

    python examples/train_tiny_model.py --output my-model --minutes 60
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import lzma
import math
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHIPPED = Path(__file__).parent.parent / "swarm_models" / "shipped" / "tiny-python-docs"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_PERCENT = 3
HELD_OUT_FILE_BYTES = 200_000
DOCUMENT_BREAK = "\n\f\n"

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
# Share of the run already done -> tokens per sequence: short ones are cheap, long ones teach the later positions.
SEQUENCE_LENGTHS = ((0.0, 128), (0.25, 256), (0.65, 512), (0.92, MAX_POSITIONS))
TOKENS_PER_STEP = 2048
WARMUP_SHARE = 0.03


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Decided by the name, so a document stays on its side when its text changes with the Python version."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


# --- text ---------------------------------------------------------------------------------------------------------


class Deduplicator:
    """Drops paragraphs seen before: the reference repeats whole sections, and repeats would leak across the split."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def fresh(self, text: str) -> str:
        kept = []
        for paragraph in text.split("\n\n"):
            key = " ".join(paragraph.split())
            if key and (len(key) < 24 or key not in self.seen):
                kept.append(paragraph)
            self.seen.add(key)
        return "\n\n".join(kept)


def collect_documents(num_modules: int | None = None) -> list[Document]:
    """Every section of the language reference and every class and module of the standard library, without repeats.

    ``num_modules``: of the library, in the order of their names; None for all, which takes seconds to read.
    """
    dedupe = Deduplicator()
    documents = []
    # Longest first: a chapter stays whole, and the sections quoted from it elsewhere disappear.
    for topic, text in sorted(pydoc_data.topics.topics.items(), key=lambda item: (-len(item[1]), item[0])):
        for section in re.split(r"\n\n(?=.+\n[*=]{3,}\n)", text.strip()):
            title = section.partition("\n")[0]
            documents.append(Document(f"topic:{topic}:{title}", dedupe.fresh(section)))
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path for path in sorted(library.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)
    ]
    for path in paths[:num_modules]:
        name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        documents += module_documents(name, ast.parse(path.read_bytes()), dedupe)
    return [document for document in documents if len(document.text) >= 200]


def module_documents(name: str, module: ast.Module, dedupe: Deduplicator) -> Iterator[Document]:
    """One document for the module and its functions, then one for each class, laid out as ``pydoc`` would."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    module.body = [node for node in module.body if node not in classes]
    title = f'The "{name}" module'
    sections = list(documented(module, 0, dedupe))
    yield Document(f"module:{name}", "\n\n".join([f"{title}\n{'*' * len(title)}", *sections]) if sections else "")
    for node in classes:
        sections = list(documented(node, 1, dedupe))
        yield Document(f"class:{name}.{node.name}", signature(node) + "\n" + "\n\n".join(sections) if sections else "")


def documented(node: ast.AST, depth: int, dedupe: Deduplicator) -> Iterator[str]:
    """The docstring of ``node`` and, further in, those of its classes and functions."""
    text = dedupe.fresh(ast.get_docstring(node) or "").strip("\n")
    if text:
        yield indented(text, depth)
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = list(documented(child, depth + 1, dedupe))
            if inner:
                yield indented(signature(child), depth) + "\n" + "\n\n".join(inner)


def signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {node.name}({ast.unparse(node.args)}):"


def indented(text: str, depth: int) -> str:
    return "\n".join("    " * depth + line if line.strip() else "" for line in text.splitlines())


# --- tokenizer and model ------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config)
    # What each block adds to the residual stream starts small, so 20 blocks train at a high rate (GPT-2, section 2.3).
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


# --- training -----------------------------------------------------------------------------------------------------


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> torch.Tensor:
    ids: list[int] = []
    for document in documents:
        ids += [*tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids)


class Batches:
    """Passes over the stream in shuffled windows; each pass cuts at other places, and each window starts with BOS."""

    def __init__(self, stream: torch.Tensor, bos: int, seed: int) -> None:
        self.stream, self.bos = stream, bos
        self.generator = torch.Generator().manual_seed(seed)
        self.length = 0
        self.starts: list[int] = []

    def next_batch(self, length: int) -> torch.Tensor:
        """[TOKENS_PER_STEP / length, length + 1] ids: position t predicts t + 1."""
        rows = TOKENS_PER_STEP // length
        if length != self.length or len(self.starts) < rows:
            self.length = length
            shift = int(torch.randint(length, (1,), generator=self.generator))
            starts = torch.arange(shift, len(self.stream) - length, length)
            self.starts = starts[torch.randperm(len(starts), generator=self.generator)].tolist()
        picked, self.starts = self.starts[:rows], self.starts[rows:]
        windows = torch.stack([self.stream[start : start + length] for start in picked])
        return F.pad(windows, (1, 0), value=self.bos)


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak."""
    if progress < WARMUP_SHARE:
        return peak * (progress + 1e-3) / (WARMUP_SHARE + 1e-3)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return peak * (0.01 + 0.99 * cosine)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024), for matrices.

    The update is scaled to the size of AdamW's (Liu et al., 2025, section 2.2), so both take the same learning rate.
    """

    def __init__(self, params: list[torch.Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonal(torch.stack([self.momentum_update(p, group["momentum"]) for p in parameters]))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates), alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))

    def momentum_update(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)  # Nesterov


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to each of [count, rows, columns], roughly."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def build_optimizers(model: LlamaForCausalLM, peak_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms."""
    blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embedding = model.model.embed_tokens.weight
    groups = [{"params": [embedding], "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return [
        Muon(blocks, lr=peak_lr, weight_decay=0.1),
        torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95), fused=True),
    ]


def train(model: LlamaForCausalLM, batches: Batches, arguments: argparse.Namespace) -> int:
    """Trains in place until the steps or the minutes are used up, whichever is first; returns the steps done."""
    optimizers = build_optimizers(model, arguments.peak_lr)
    step, earlier_s = 0, 0.0
    if arguments.resume:
        state = torch.load(arguments.resume, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        batches.generator.set_state(state["generator"])
        step, earlier_s = state["step"], state["elapsed_s"]
        print(f"resumed at step {step}", flush=True)
    model.train()
    begin_s = time.monotonic() - earlier_s
    saved_s, recent_loss = time.monotonic(), 0.0
    while True:
        elapsed_s = time.monotonic() - begin_s
        progress = max(step / arguments.steps, elapsed_s / 60 / arguments.minutes)
        if progress >= 1:
            return step
        length = max(length for share, length in SEQUENCE_LENGTHS if share <= progress)
        ids = batches.next_batch(length)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(arguments.peak_lr, progress)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        recent_loss = loss.item() if step == 1 else 0.95 * recent_loss + 0.05 * loss.item()
        if step % 50 == 0:
            tokens_per_s = step * TOKENS_PER_STEP / (time.monotonic() - begin_s)
            print(
                f"step {step:5d}  {progress:6.1%}  sequence {length:4d}  loss {recent_loss:.3f}  "
                f"lr {learning_rate(arguments.peak_lr, progress):.2e}  {tokens_per_s:,.0f} tokens/s",
                flush=True,
            )
        if time.monotonic() - saved_s > 180:
            saved_s = time.monotonic()
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
            state |= {"generator": batches.generator.get_state(), "elapsed_s": saved_s - begin_s}
            part = arguments.checkpoint.with_suffix(".part")
            torch.save(state, part)
            os.replace(part, arguments.checkpoint)


# --- evaluation ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def model_bits_per_byte(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[Document], window: int = 512
) -> float:
    """Bits to predict each document from its own beginning, in windows that see at least half of ``window`` before."""
    model.eval()
    nats = 0.0
    for document in documents:
        ids = torch.tensor(tokenizer(document.text, verbose=False)["input_ids"])  # BOS first
        scored = 1
        while scored < len(ids):
            start = max(0, scored - window // 2)
            chunk = ids[start : start + window]
            log_probs = model(input_ids=chunk[None, :-1], use_cache=False).logits[0].float().log_softmax(-1)
            losses = -log_probs.gather(1, chunk[1:, None])[:, 0]
            nats += losses[scored - start - 1 :].sum().item()
            scored = start + len(chunk)
    model.train()
    return nats / math.log(2) / sum(len(document.text.encode()) for document in documents)


def baseline_bits_per_byte(training: bytes, held_out: bytes) -> dict[str, float]:
    """What simpler models that saw the same training text need for the same held-out text."""

    def xz(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    return {
        "byte unigram": ngram_bits_per_byte(training, held_out, order=0),
        "byte trigram, interpolated": ngram_bits_per_byte(training, held_out, order=2),
        "byte 6-gram, interpolated": ngram_bits_per_byte(training, held_out, order=5),
        "zlib -9, held-out text alone": 8 * len(zlib.compress(held_out, 9)) / len(held_out),
        "xz -9e, after the training text": 8 * (xz(training + held_out) - xz(training)) / len(held_out),
    }


def ngram_bits_per_byte(training: bytes, held_out: bytes, order: int) -> float:
    """Each context length interpolated with the next shorter one by Witten-Bell smoothing; uniform below them all."""
    counts: list[dict[bytes, Counter[int]]] = []
    for length in range(order + 1):
        table: dict[bytes, Counter[int]] = defaultdict(Counter)
        for end in range(length, len(training)):
            table[training[end - length : end]][training[end]] += 1
        counts.append(table)
    totals = [{context: seen.total() for context, seen in table.items()} for table in counts]
    bits = 0.0
    for position, byte in enumerate(held_out):
        probability = 1 / 256
        for length in range(min(order, position) + 1):
            context = held_out[position - length : position]
            total = totals[length].get(context, 0)
            if total == 0:
                break
            seen = counts[length][context]
            probability = (seen[byte] + len(seen) * probability) / (total + len(seen))
        bits -= math.log2(probability)
    return bits / len(held_out)


# --- saving -------------------------------------------------------------------------------------------------------


def save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: dict[str, str]) -> None:
    """Writes the model in float16, its tokenizer and ``texts``; each file is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        half = LlamaForCausalLM(model.config).half()
        half.load_state_dict(model.state_dict())
        half.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        half.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for name, text in texts.items():
            Path(scratch, name).write_text(text, encoding="utf-8")
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def held_out_text(documents: list[Document]) -> str:
    """The held-out documents between form feeds, as many whole characters as fit the file."""
    text = DOCUMENT_BREAK.join(document.text for document in documents)
    return text.encode()[:HELD_OUT_FILE_BYTES].decode(errors="ignore")


CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-python-docs

A Llama of {blocks} blocks and {parameters:,} parameters that writes text in the manner of Python's documentation. It
ships with Swarm so that a swarm can be tried, split and tested on one machine without downloading anything. It knows
how such text looks, not what is true: use it to see a swarm work, never to learn Python.

|  |  |
|---|---|
| shape | {blocks} blocks, hidden {hidden}, MLP {mlp}, {heads} heads, {kv_heads} key-value heads, tied embeddings |
| tokenizer | byte-level BPE, {vocab} tokens, puts `{bos}` before every text |
| positions | {positions} |
| weights | float16, {megabytes:.1f} MB |
| data | Python {python}: `pydoc_data.topics` and the standard library's docstrings, {training_mb:.2f} MB |
| training | {steps} steps of {tokens_per_step} tokens ({tokens:.1f} million, {passes:.1f} passes), Muon and AdamW |

## Held-out text

{held_out_documents} documents ({held_out_kb:.0f} kB, chosen by the hash of their names) were kept from training, the
tokenizer's included. They are in `heldout.txt`, separated by form feeds. Bits per byte, lower is better; the baselines
saw the same training text:

| predictor | bits per byte |
|---|---|
{scores}

## Reproduce

    python examples/train_tiny_model.py {options}

The text is part of Python and is © Python Software Foundation, under the PSF licence.
"""


def score_table(scores: dict[str, float]) -> str:
    return "\n".join(f"| {name} | {bits:.3f} |" for name, bits in scores.items())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder for the model (default: the shipped one)")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then; the schedule follows the clock")
    parser.add_argument("--peak-lr", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "tiny-python-docs.pt")
    parser.add_argument("--resume", type=Path, help="continue from this checkpoint")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    documents = collect_documents()
    training = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    training_bytes = "\n\n".join(document.text for document in training).encode()
    held_out_bytes = "\n\n".join(document.text for document in held_out).encode()
    tokenizer = train_tokenizer([document.text for document in training])
    stream = token_stream(tokenizer, training)
    model = build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters")
    print(f"training: {len(training)} documents, {len(training_bytes):,} bytes, {len(stream):,} tokens")
    print(f"held out: {len(held_out)} documents, {len(held_out_bytes):,} bytes", flush=True)

    batches = Batches(stream, tokenizer.bos_token_id, arguments.seed)
    steps = train(model, batches, arguments)

    scores = {"this model": model_bits_per_byte(model, tokenizer, held_out)}
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    scores["this model, rounded to float16"] = model_bits_per_byte(model, tokenizer, held_out)
    scores |= baseline_bits_per_byte(training_bytes, held_out_bytes)
    print(score_table(scores), flush=True)
    config = model.config
    card = CARD.format(
        blocks=config.num_hidden_layers,
        parameters=parameters,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocab=config.vocab_size,
        bos=BOS,
        positions=config.max_position_embeddings,
        megabytes=2 * parameters / 1e6,
        python=".".join(map(str, sys.version_info[:2])),
        training_mb=len(training_bytes) / 1e6,
        steps=steps,
        tokens_per_step=TOKENS_PER_STEP,
        tokens=steps * TOKENS_PER_STEP / 1e6,
        passes=steps * TOKENS_PER_STEP / len(stream),
        held_out_documents=len(held_out),
        held_out_kb=len(held_out_bytes) / 1e3,
        scores=score_table(scores),
        options=f"--steps {arguments.steps} --minutes {arguments.minutes:g} --seed {arguments.seed}",
    )
    save(arguments.output, model, tokenizer, {"README.md": card, "heldout.txt": held_out_text(held_out)})


if __name__ == "__main__":
    main()
