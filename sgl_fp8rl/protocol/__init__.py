"""What trainer and engine tell each other, and memory that both see."""
