"""Replay's storage: tables over one store of chunks, in one folder. No network, no torch."""
