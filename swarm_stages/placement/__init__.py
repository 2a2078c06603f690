"""Decides which stage a peer works at, and when it moves to another."""
