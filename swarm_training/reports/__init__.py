"""The numbers of a run over time, and the places where they are reported, such as TensorBoard."""
