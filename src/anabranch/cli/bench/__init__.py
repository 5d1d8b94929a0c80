"""moe_mlp beside its peers, as a share of what the machine could do."""
