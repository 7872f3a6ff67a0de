"""What another SGLang changed of what this package uses (``python -m tests.drift``)."""
