"""From sampled batches to what the agent learns from."""
