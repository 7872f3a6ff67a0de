"""What the ranks of a trainer tell each other."""
