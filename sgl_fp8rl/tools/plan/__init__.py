"""``sgl-fp8rl plan``: what an engine's rollouts and updates would take."""
