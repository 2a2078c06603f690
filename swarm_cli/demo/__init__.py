"""The command ``demo``, and the cluster of local server processes that the demo and the benchmarks start."""
