"""Scripts that go into a probe kit as they are; text files, since they run without this package."""
