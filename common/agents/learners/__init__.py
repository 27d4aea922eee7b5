"""What only a learner needs: the optimiser of a network, and what goes with it. Agents hold one of these."""
