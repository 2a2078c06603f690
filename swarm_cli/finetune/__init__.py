"""The command ``finetune``: data, trainer, checkpoints, and the loss curve."""
