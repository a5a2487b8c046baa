"""deepthin.profiles."""
