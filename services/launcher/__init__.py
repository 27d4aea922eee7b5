"""One machine: every service of a run started, watched, restarted and stopped."""
