"""``finetune``: data, trainer, checkpoints, the loss curve."""
