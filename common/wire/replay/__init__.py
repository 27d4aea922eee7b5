"""Replay as its clients see it."""
