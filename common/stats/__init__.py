"""Scores and their uncertainty. Pure functions over numbers."""
