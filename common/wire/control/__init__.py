"""What learner and members of a run say to each other: control, parameters, telemetry."""
