"""The end of an update on any engine's rank, through the ``EngineHost`` that its engine gives."""
