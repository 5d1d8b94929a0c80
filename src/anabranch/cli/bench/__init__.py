"""moe_mlp beside its peers, as a share of the speed of dense products."""
