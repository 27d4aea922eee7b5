"""`troupe env check`, and what else looks at an environment before a run begins."""
