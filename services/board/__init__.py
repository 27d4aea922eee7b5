"""`troupe board`: one web page for runs."""
