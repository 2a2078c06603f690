"""The run file that ``swarm train init`` writes: the settings that are required, and optional ones in comments."""

from __future__ import annotations

from swarm_training.compression.settings import CODECS
from swarm_training.core.config import AGGREGATIONS
from swarm_training.runfile.settings import OPTIMIZERS, PRESETS, SCHEDULES
from swarm_training.runfile.stage_settings import PRECISIONS, SUMS, WIRE_FORMS

_TEXT = """\
# A training run. Everybody who joins has the same file: `swarm train join {file}`

[run]
name = "my-run"
target_batch_size = 1024      # samples of all peers together, after which they average and step
# checkpoint_every = 100      # steps
# checkpoints = "checkpoints" # a directory; "": this machine writes none
# keep = 3                    # number of newest checkpoints that stay
# restart_wait_s = 30.0       # wait of the peer that starts the run again for others with a newer checkpoint; 0: none
# hub = ""                    # a repository owner/name on the hub that gets a copy of each

[model]
name_or_path = "gpt2"         # a causal language model on the hub, or a directory
# preset = ""                 # instead of it, a new Llama: {presets}
# init = "random"             # or "pretrained"
# tokenizer = ""              # a tokenizer on the hub, or a directory; "": the model's own
# seed = 0                    # seed of random weights

[data]
source = "texts"              # a file or directory of .txt and .jsonl, or a data set on the hub
block_length = 512            # tokens of a sample
# streaming = false           # true: read while training, for data larger than the disk
# column = "text"             # the column of a data set that has the texts
# split = "train"             # the split of a data set
# config = ""                 # the configuration, if a data set on the hub has several
# buffer_size = 1000          # blocks that streaming shuffles at a time

[optimizer]
name = "adamw"                # {optimizers}
lr = 1e-3
# weight_decay = 0.0
# decay_vectors = true        # false: biases and the scales of norms do not decay
# schedule = "constant"       # {schedules}
# warmup_steps = 0
# total_steps = 0             # the step at which linear and cosine schedules reach 0; training ends there
# average_decay = 0.0         # such as 0.999: of the moving average of the weights, which checkpoints have too; 0: none

[averaging]
# codec = "fp32"              # {codecs}: how gradients travel
# error_feedback = false      # true: what the codec loses is added to the next gradient
# power_sgd_rank = 0          # above 0: matrices travel as two factors of this rank
# straggler_s = 0.0           # seconds for which peers wait for a slow one; 0: 5, or 600 with local steps
# delay = false               # true: the next batch is computed while gradients travel; gradients are one step older.
#                             # With local steps: a peer goes on from its own parameters, which become the shared ones
#                             # plus the steps that the average does not have when it is applied
# aggregation = "mean"        # {aggregations}: the second is moved little by a minority of cheaters
# max_samples = 0             # of one peer that count in a step, whatever it claims; 0: all

[clip]
# max_norm = 0.0              # above 0, such as 1.0: the norm to which the gradient of a batch is clipped

[local]                       # steps of each peer's own between two averages: for slow lines
# batch_size = 0              # samples of a local step, which [optimizer] takes; 0: no local steps
# outer_lr = 1.0              # learning rate of the step that follows an average
# outer_momentum = 0.0        # 0.9, with nesterov and outer_lr = 0.7, can pay in runs of hundreds of averages
# nesterov = false

[evaluation]                  # on held-out data, by one peer; runs in stages wait for it
# every = 0                   # steps; 0: never
# source = ""                 # the held-out data, as under [data]
# samples = 256               # so many of them, the first ones
# column = "text"             # of a data set
# split = "validation"        # of a data set
# config = ""                 # of a data set on the hub that has several
# patience = 0                # evaluations without an improvement that end the run; 0: it goes on
# least_improvement = 0.0     # that counts as one

[rollback]                    # to a checkpoint, when the loss is not finite, or too high
# margin = 1.0                # a loss is too high if it is above the median of the last losses by this
# patience = 10               # steps in a row with too high a loss, after which the run goes back
# window = 100                # number of losses in the median
# warmup = 20                 # number of losses before any can be too high

[batch]
# size = 0                    # samples that a machine computes at once; 0: it finds out what fits
# max_size = 256              # the largest size that it tries

[stages]                      # for a model that fits on no machine: each peer holds a stage, a part of it
# count = 0                   # number of stages; 0: every peer holds the whole model
# micro_batch_size = 1        # samples that go through the stages together
# sums = "fp32"               # {sums}: of gradients; in the second they do not depend on the order
# activations = "fp32"        # {forms}: how activations travel
# gradients = "fp32"          # the same, for gradients
# layers = "none"             # or "bottleneck:4", "maxout:2": trained between stages, so that fewer numbers travel
# precision = "fp32"          # {precisions}: the number format of computing
# checkpoint_activations = false # true: blocks are computed twice, in less memory
# lora_rank = 0               # above 0: adapters of this rank are trained instead of the weights
# audit_share = 0.0           # up to 1: the share of answers that other peers compute too, to find wrong ones

[tokens]
# organiser = ""              # the key that `swarm keys create` prints: only members take part; "": anybody may
"""


def example(file: str) -> str:
    choices = {
        "aggregations": AGGREGATIONS,
        "codecs": CODECS,
        "optimizers": OPTIMIZERS,
        "presets": PRESETS,
        "schedules": SCHEDULES,
        "sums": SUMS,
        "forms": WIRE_FORMS,
        "precisions": PRECISIONS,
    }
    return _TEXT.format(file=file, **{name: ", ".join(values) for name, values in choices.items()})
