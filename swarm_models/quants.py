"""The names of the quantisations that a server can use."""

METHODS = ("int8", "int4", "nf4", "none", "bnb-int8")
