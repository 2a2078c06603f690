"""Carries out the commands of training in stages: serves a stage, trains, exports what was trained."""
