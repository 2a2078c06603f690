"""The run file that ``swarm train init`` writes: what must be chosen, and in comments what may be."""

from __future__ import annotations

from swarm_training.compression.settings import CODECS
from swarm_training.core.config import AGGREGATIONS
from swarm_training.runfile.settings import OPTIMIZERS, PRESETS, SCHEDULES

_TEXT = """\
# A training run. Everybody who joins has the same file: `swarm train join {file}`

[run]
name = "my-run"
target_batch_size = 1024      # samples of all peers together, after which they average and step
# checkpoint_every = 100      # steps
# checkpoints = "checkpoints" # a directory; "": this machine writes none
# keep = 3                    # so many of them
# hub = ""                    # a repository owner/name on the hub that gets a copy of each

[model]
name_or_path = "gpt2"         # a causal language model on the hub, or a directory
# preset = ""                 # instead: {presets}
# init = "random"             # or "pretrained"
# tokenizer = ""              # on the hub or a directory; "": the model's own
# seed = 0                    # of random weights

[data]
source = "texts"              # a file or directory of .txt and .jsonl, or a data set on the hub
block_length = 512            # tokens of a sample
# streaming = false           # true: read while training, for data larger than the disk
# column = "text"             # of a data set
# split = "train"             # of a data set
# config = ""                 # of a data set on the hub that has several
# buffer_size = 1000          # blocks that streaming shuffles

[optimizer]
name = "adamw"                # {optimizers}
lr = 1e-3
# weight_decay = 0.0
# schedule = "constant"       # {schedules}
# warmup_steps = 0
# total_steps = 0             # at which linear and cosine arrive at 0

[averaging]
# codec = "fp32"              # {codecs}: how gradients travel
# error_feedback = false      # true: what the codec loses is added to the next gradient
# power_sgd_rank = 0          # above 0: matrices travel as two factors of this rank
# aggregation = "mean"        # {aggregations}: the second is moved little by a minority of cheaters

[rollback]                    # to a checkpoint, when the loss is not finite, or too high
# margin = 1.0                # above the median of the last losses
# patience = 10               # steps in a row
# window = 100                # losses of which the median is taken
# warmup = 20                 # before so many, none is too high

[batch]
# size = 0                    # samples that a machine computes at once; 0: it finds out what fits
# max_size = 256              # that it tries

[tokens]
# organiser = ""              # of `swarm keys create`: only members take part; "": anybody may
"""


def example(file: str) -> str:
    choices = {
        "aggregations": AGGREGATIONS,
        "codecs": CODECS,
        "optimizers": OPTIMIZERS,
        "presets": PRESETS,
        "schedules": SCHEDULES,
    }
    return _TEXT.format(file=file, **{name: ", ".join(values) for name, values in choices.items()})
