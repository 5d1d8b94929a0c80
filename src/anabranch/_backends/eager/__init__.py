"""What eager backends share: one product, and the walk over experts in blocks that stay in cache."""
