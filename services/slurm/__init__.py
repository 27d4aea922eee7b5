"""A run as a heterogeneous job of Slurm, and the runs of a sweep as a job array."""
