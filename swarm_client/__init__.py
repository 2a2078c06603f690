"""Runs and fine-tunes models whose blocks live on other machines."""
