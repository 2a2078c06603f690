"""Several processes as one server: each holds some of the rows of every linear layer."""
