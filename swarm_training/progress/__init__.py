"""The peers' knowledge of each other: signed records of progress, and the decisions that follow from them."""
