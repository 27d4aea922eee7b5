"""Many runs: sweeps that make them, and whatever reads what they left behind."""
