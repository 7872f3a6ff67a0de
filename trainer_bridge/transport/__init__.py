"""Connections to the ranks of engines, and device memory that they read in place."""
