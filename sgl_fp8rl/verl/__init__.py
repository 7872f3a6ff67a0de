"""verl 0.9.1: ``actor_rollout_ref.rollout.quantization=fp8rl`` (docs/frameworks.md)."""
