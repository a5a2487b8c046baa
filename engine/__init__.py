"""deepthin.engine."""
