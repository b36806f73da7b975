"""The growing network: hosts, slots, seeds, blueprints, blending, gates, wrapping any module, export."""

from esper.kasmina.blueprints import REGISTRY, Blueprint, BlueprintRegistry, blueprint
from esper.kasmina.checks import check_blueprint, check_host
from esper.kasmina.hosts import ChainHost, build_cnn_host, build_mlp_host, build_resnet_host, build_transformer_host
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.settings import GrowthSettings, SlotChange
from esper.kasmina.slot import SeedSlot

__all__ = [
    "REGISTRY",
    "Blueprint",
    "BlueprintRegistry",
    "ChainHost",
    "GrowthSettings",
    "MorphogeneticModel",
    "SeedSlot",
    "SlotChange",
    "blueprint",
    "build_cnn_host",
    "build_mlp_host",
    "build_resnet_host",
    "build_transformer_host",
    "check_blueprint",
    "check_host",
]
