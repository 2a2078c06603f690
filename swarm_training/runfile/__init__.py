"""The run file, which says what a run trains, on which data and how. All peers of a run have the same file."""
