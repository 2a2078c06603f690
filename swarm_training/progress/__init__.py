"""What peers know of each other: signed records of progress, and what follows from them."""
