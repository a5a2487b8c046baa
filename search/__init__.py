"""deepthin.search."""
