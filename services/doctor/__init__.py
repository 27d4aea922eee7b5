"""`troupe doctor`: what is wrong with a machine, a run directory, or a run at an address."""
