"""What somebody adds to Troupe from outside: an algorithm and an environment."""
