"""Stand-in: tests only."""
