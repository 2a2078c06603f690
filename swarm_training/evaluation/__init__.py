"""The evaluation of a run on held-out data: who computes its loss, what the peers agree on, and when the run ends."""
