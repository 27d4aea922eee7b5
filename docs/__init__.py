"""The pages, and what writes those that are made from the code."""
