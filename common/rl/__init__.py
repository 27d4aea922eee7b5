"""Pure functions of reinforcement learning: targets, losses, corrections."""
