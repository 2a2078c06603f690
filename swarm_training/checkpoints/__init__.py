"""What a run writes down every k steps, in a directory or on the hub."""
