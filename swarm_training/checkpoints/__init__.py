"""What a run writes down every k steps, in a directory or on the hub, and when it goes back to it."""
