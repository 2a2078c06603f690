"""Simulated worlds: real code of Swarm over clocks, networks and DHTs that obey a test."""
