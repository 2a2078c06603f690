"""The commands of training in stages: serving a stage, training, and exporting the trained model."""
