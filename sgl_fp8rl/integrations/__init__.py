"""Old names of ``trainer_bridge.adapters``, for one release."""
