"""The operator console (speaks HTTP only)."""
