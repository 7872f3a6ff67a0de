"""Old names of ``trainer_bridge.adapters`` and ``sgl_fp8rl.verl``, for one release."""
