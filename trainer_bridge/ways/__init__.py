"""How weights reach engines: read where they lie, or carried in chunks."""
