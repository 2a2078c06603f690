"""Several processes or machines as one server: each holds some of the rows of every linear layer."""
