"""Models by name: each family is one file, with its layers, options, variants and published key layouts.

A name goes in; an `nn.Module` comes out, with timm's names for parameters. `catalogue` lists the families and says what
the file of one has; `weights` loads and saves.

Begin with `vit`, then `levit` or `pvt`; a further family goes into `catalogue`.
"""

from . import hub
from .catalogue import CATALOGUE, FAMILIES, create_model, family_of, list_models, model_config, nearest
from .config import ViTConfig
from .features import FeatureGetterNet
from .weights import publish

hub.publish = publish

__all__ = ["FeatureGetterNet", "ViTConfig", "create_model", "list_models"]
__all__ += ["CATALOGUE", "FAMILIES", "family_of", "model_config", "nearest"]
