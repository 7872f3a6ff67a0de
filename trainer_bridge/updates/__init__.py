"""One update: from a model or a stream to the version that engines serve."""
