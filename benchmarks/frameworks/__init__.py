"""Trainers of other frameworks on FP8 rollouts: runs whose result is a log by step.

``benchmarks.run`` keeps medians of repeated values, which a run that learns has not.
"""
