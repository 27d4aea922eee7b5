"""Who may say what: keys, their roles, and the claims that each permits."""
