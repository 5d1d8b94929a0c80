"""A small byte-level MoE transformer, trained in a few minutes on whatever text is at hand."""
