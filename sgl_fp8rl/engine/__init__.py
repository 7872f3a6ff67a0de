"""SGLang as the host of our receiver: all that knows SGLang."""
