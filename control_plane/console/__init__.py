"""What the operator console sees: history, pages, prices. HTTP is in control_plane/routes/console.py."""
