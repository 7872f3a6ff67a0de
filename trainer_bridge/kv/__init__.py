"""KV scales from the trainer, and its attention over K and V as an engine stores them."""
