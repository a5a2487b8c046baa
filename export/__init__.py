"""deepthin.export."""
