"""Neural networks: torsos, cores and heads."""
