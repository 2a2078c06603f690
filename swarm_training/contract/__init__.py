"""The interface that commands and callbacks need of a training run, and the views that show a run."""
