"""The growing network: hosts, slots, seeds, blueprints, blending, gates, wrapping any module, export."""

from esper.kasmina.blueprints import REGISTRY as REGISTRY
from esper.kasmina.blueprints import blueprint as blueprint
from esper.kasmina.checks import check_blueprint as check_blueprint
from esper.kasmina.checks import check_host as check_host
from esper.kasmina.hosts import ChainHost as ChainHost
from esper.kasmina.hosts import build_cnn_host as build_cnn_host
from esper.kasmina.hosts import build_mlp_host as build_mlp_host
from esper.kasmina.hosts import build_resnet_host as build_resnet_host
from esper.kasmina.hosts import build_transformer_host as build_transformer_host
from esper.kasmina.model import MorphogeneticModel as MorphogeneticModel
from esper.kasmina.settings import GrowthSettings as GrowthSettings
from esper.kasmina.slot import SeedSlot as SeedSlot
