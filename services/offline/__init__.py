"""Data sets into replay, and replay into data sets."""
