"""deepthin.engine.kernels."""
