"""Small models whose layers share their parameters."""
