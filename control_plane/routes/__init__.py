"""HTTP routes, one file a family."""
