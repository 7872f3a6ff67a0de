"""The end of an update on any engine's rank, through the ``Host`` that its engine gives it."""
