"""The bucket ladder: every shape that is ever compiled."""
