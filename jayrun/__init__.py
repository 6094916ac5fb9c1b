"""Public names (to be filled)."""
