"""Membership of private swarms: tokens that the organiser signs, and the checks of them."""
