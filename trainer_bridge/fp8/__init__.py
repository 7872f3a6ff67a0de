"""A trainer's forward pass that computes as the engine's FP8 layers do."""
