"""Adapters of training frameworks: only the module of a framework imports it."""
