"""deepthin.cli."""
