"""Whether others answer wrongly over the blocks that are hosted here, and who is told."""
