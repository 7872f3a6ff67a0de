"""Connections to the ranks of engines, and the memory that carries weights."""
