"""Central inference: the learner chooses the actions."""
