"""Bounds of the times that a run may ask its services to keep: the configuration and the wire share them."""

from __future__ import annotations

HEARTBEAT_S = (0.01, 60.0)
"""Least and most seconds between two heartbeats."""
HEARTBEATS_LATE = 2.5
"""A peer not heard for so many heartbeats is more than late: one may be lost, and one delayed."""
LIVENESS_S = (0.1, 3600.0)
"""Least and most seconds of silence after which a peer is given up."""
MAX_PATIENCE_S = 86_400.0
"""Most seconds that a service waits for a peer at its start."""

HANG_S = 300.0
"""How long a loop of a service may stand still, where no configuration says otherwise."""
