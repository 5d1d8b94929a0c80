"""Modules that own parameters: routers, experts, the MoE layer of them, and rotary embeddings."""

from anabranch.nn.balance import expert_counts, load_balance_loss, z_loss
from anabranch.nn.experts import Experts
from anabranch.nn.moe import MoE
from anabranch.nn.multi_expert_linear import MultiExpertLinear
from anabranch.nn.rotary import Rotary
from anabranch.nn.router import Router, Routing
from anabranch.nn.shared_expert import SharedExpert

__all__ = [
    "Experts",
    "MoE",
    "MultiExpertLinear",
    "Rotary",
    "Router",
    "Routing",
    "SharedExpert",
    "expert_counts",
    "load_balance_loss",
    "z_loss",
]
