"""The transformer, described by data."""
