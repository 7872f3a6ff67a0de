"""A trainer's weights, by the names of the Hugging Face checkpoint."""
