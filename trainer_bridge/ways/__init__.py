"""Where engines read weights: in the trainer's own memory, or in a bucket that it fills."""
