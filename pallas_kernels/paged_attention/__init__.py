"""Decode attention: one new token a row over keys and values in pages."""
