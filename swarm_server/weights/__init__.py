"""Distribution of the checkpoint's files to other members: which files are offered, and how fast they are sent."""
