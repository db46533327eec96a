"""The engine, its owner thread and what may be asked of it."""
