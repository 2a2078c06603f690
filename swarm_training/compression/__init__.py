"""How vectors of numbers become bytes, and what is averaged in place of a gradient."""
