"""`troupe export`: a policy as a file for other programs."""
