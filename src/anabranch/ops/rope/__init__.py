"""Rotary position embeddings, with one position a token (rope) or three (mrope)."""
