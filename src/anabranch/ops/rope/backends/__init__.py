"""How vectors are rotated."""
