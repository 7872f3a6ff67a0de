"""An engine, in this process or behind HTTP, and calls to several."""
