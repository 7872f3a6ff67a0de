"""Adapters of RL frameworks: each is imported by its framework only, and imports it."""
