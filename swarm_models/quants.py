"""The names of the quantisations that a server can use, of weights and of keys and values."""

METHODS = ("int8", "int4", "fp8", "nf4", "none", "bnb-int8")
BY_ROWS = ("int8", "int4", "fp8")  # each row of a weight is rounded by itself
KV_METHODS = ("none", "int8")
