"""Positions of multimodal tokens: what rotary embeddings and window attention index by."""
