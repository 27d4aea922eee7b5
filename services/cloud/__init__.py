"""Runs in AWS by the dollar: what one costs, and one that ends at a budget or a goal."""
