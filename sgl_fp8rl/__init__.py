"""FP8 rollouts for LLM reinforcement learning on SGLang: the engine's side, and the tools.

The public calls are in ``trainer_bridge`` and ``server_args``. SGLang imports this package in each
of its processes, so that it loads nothing of its own.
"""

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sgl-fp8rl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
