"""A two-phase commit with the engines of an update, and what is kept of them between two."""
