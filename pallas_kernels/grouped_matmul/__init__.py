"""The product of rows sorted by expert with each expert's own matrix, for Hopper GPUs."""
