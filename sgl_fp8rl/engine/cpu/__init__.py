"""SGLang's platform on a CPU, for tests and the demo."""
