"""deepthin.engine.simd."""
