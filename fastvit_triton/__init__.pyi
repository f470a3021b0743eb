# The public surface. `__init__.py` loads each name from here on first use, so this list is the only one.
from . import explain as explain
from . import train as train
from .convert import optimize as optimize
from .convert import report as report
from .convert import revert as revert
from .export import export_model as export_model
from .graphs import cuda_graph as cuda_graph
from .kernels.attention import attention as attention
from .kernels.attention import varlen_attention as varlen_attention
from .kernels.attention_qkv import attention_qkv as attention_qkv
from .kernels.backend import backend as backend
from .kernels.backend import set_backend as set_backend
from .kernels.backend import using_backend as using_backend
from .kernels.depthwise import depthwise as depthwise
from .kernels.fold import fold as fold
from .kernels.layer_norm import add_layer_norm as add_layer_norm
from .kernels.layer_norm import layer_norm as layer_norm
from .kernels.linear import linear as linear
from .kernels.mlp import mlp as mlp
from .kernels.patch_embed import patch_embed as patch_embed
from .kernels.window import window_attention as window_attention
from .layers.freeze import freeze as freeze
from .layers.freeze import unfreeze as unfreeze
from .measure.tune import tune as tune
from .models.config import ViTConfig as ViTConfig
from .packed_graphs import cuda_graph_packed as cuda_graph_packed
from .preparation import data_config as data_config
from .train.data.model_input import transforms as transforms
from .warm_up import warmup as warmup
from .weights import load_model as load_model
from .weights import load_weights as load_weights
from .weights import save_weights as save_weights
from .weights.create import create_model as create_model
from .weights.pretrained import list_models as list_models

__version__: str
