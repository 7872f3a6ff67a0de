"""``sgl-fp8rl plan``: what a rollout will take before it runs, from measured figures."""
