"""Routing of tokens to experts and back."""
