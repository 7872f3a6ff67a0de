"""Rollouts, their replies and routed experts, and the trainer's logprobs of them."""
