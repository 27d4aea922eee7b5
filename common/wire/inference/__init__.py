"""Central inference as an actor sees it."""
