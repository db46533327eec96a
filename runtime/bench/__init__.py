"""Measurements: python -m runtime.bench."""
