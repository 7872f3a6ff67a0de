"""Adapters of RL frameworks: each is imported where its framework is, and imports it."""
