"""Verification of servers' answers: comparison of two answers, signed statements, and evidence of false answers."""
