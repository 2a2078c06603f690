"""The file that says what a run trains, on what and how; everybody who joins has the same."""
