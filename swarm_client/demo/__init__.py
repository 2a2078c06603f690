"""``demo``, and the cluster of local server processes that it and the benchmarks start."""
