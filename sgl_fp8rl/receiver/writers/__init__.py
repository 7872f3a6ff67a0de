"""Read chunks in the trainer's memory and write them through routes."""
