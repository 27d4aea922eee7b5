"""From steps to chunks: what an actor collects before it inserts."""
