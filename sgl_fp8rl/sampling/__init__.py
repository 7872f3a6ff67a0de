"""Drawing tokens and their log-probabilities in one pass over the vocabulary."""
