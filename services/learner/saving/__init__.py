"""Checkpoints: written, counted, and kept."""
