"""What a run leaves in writing: curves, episodes, films, trackers."""
