"""iGPT — Generative pretraining from pixels. Chen et al., ICML 2020. Official: openai/image-gpt, src/model.py.

Differs from ViT:
  1. A token is a pixel, the number of the nearest of 512 colours; the model predicts each from those before it.
  2. Attention is causal; norms divide by the root of the mean square (RMSNorm); the MLP has QuickGELU.
  3. The first token is a learned start, or that of the class in models with num_classes, which the paper has not.
  4. There is no classifier: the middle block's normalised tokens, averaged, are classified linearly (section 2.3).
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, WeightsError
from ..engine.body import normalize
from ..kernels.activation import apply_activation
from ..kernels.attention import attention
from ..kernels.attention_qkv import attention_qkv
from ..layers.embed import sides
from ..layers.fusable import Fusable
from .base import LAST
from .config import BaseConfig, Options, check_multiple
from .pixel import KeyValues, PixelModel


class CausalAttention(Fusable):
    """Self-attention in which a position sees itself and those before it. Names of parameters are GPT-2's."""

    def __init__(self, dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(dim, 3 * dim, bias=bias)
        self.c_proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        """The next n positions [B, n, D] → [B, n, D]; `past` holds those before them."""
        return self.c_proj(self.attend(self.c_attn(x), past))

    def attend(self, qkv: Tensor, past: KeyValues | None = None) -> Tensor:
        """Packed projections [B, n, 3·D] → the heads' outputs [B, n, D]."""
        if past is None:
            return attention_qkv(qkv, self.num_heads, causal=True)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, n, d]
        return attention(q, *past.append(k, v), causal=True).transpose(1, 2).flatten(2)


class ColourMlp(Fusable):
    """Two linear layers with QuickGELU between them, x · sigmoid(1.702 x). Names of parameters are GPT-2's."""

    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, hidden, bias=bias)
        self.c_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, D] → [B, n, D]."""
        return self.c_proj(apply_activation(self.c_fc(x), "quick_gelu"))


class ColourBlock(Fusable):
    """x + attention(norm x), then x + MLP(norm x); the norms are x / √(mean x² + ε) · g."""

    def __init__(self, dim: int, num_heads: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.ln_1 = nn.RMSNorm(dim, eps)
        self.attn = CausalAttention(dim, num_heads, bias)
        self.ln_2 = nn.RMSNorm(dim, eps)
        self.mlp = ColourMlp(dim, 4 * dim, bias)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        """The next n positions [B, n, D] → [B, n, D]; `past` holds those before them."""
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


@dataclass(frozen=True, kw_only=True)
class IGPTConfig(BaseConfig):
    """Options of iGPT, in addition to those of `BaseConfig`; num_classes is the number of start tokens of classes.

    Attributes:
        n_colors: K, number of colours.
        bias: biases of the linear layers, as in transformers; OpenAI's models have none.
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 0
    n_colors: int = 512
    embed_dim: int = 512
    depth: int = 24
    num_heads: int = 8
    eps: float = 1e-5
    bias: bool = True
    zeros = ("num_classes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self, "embed_dim", "num_heads")
        if self.drop_path_rate:
            raise ValueError(f"drop_path_rate is {self.drop_path_rate}; iGPT has no stochastic depth")


class IGPT(PixelModel):
    """iGPT; a position is a pixel, and its features are tokens [B, H·W, D].

    Attributes:
        clusters: the colours [K, C], in the normalised values of images, which are between −1 and 1 in the paper.
    """

    config: IGPTConfig
    layout = "igpt"
    blocks_path = "h"
    stem_pattern = r"^wte|^wpe"
    layer_patterns = ((r"^h\.(\d+)", None), (r"^ln_f|^lm_head", LAST))
    order = None
    clusters: Tensor

    def __init__(self, config: IGPTConfig) -> None:
        D = config.embed_dim
        super().__init__(config, D)
        height, width = sides(config.img_size)
        self.num_positions = height * width
        self.wte = nn.Embedding(config.n_colors + max(config.num_classes, 1), D)
        self.wpe = nn.Embedding(self.num_positions, D)
        self.h = nn.ModuleList(ColourBlock(D, config.num_heads, config.eps, config.bias) for _ in range(config.depth))
        self.ln_f = nn.RMSNorm(D, config.eps)
        self.lm_head = nn.Linear(D, config.n_colors, bias=False)
        self.register_buffer("clusters", uniform_colours(config.n_colors, config.in_chans))
        self.init_weights()

    @property
    def pretrained_cfg(self) -> Mapping[str, Any]:
        """What is known of the weights, with timm's keys; `clusters` in a new value are set and not kept here."""
        return super().pretrained_cfg

    @pretrained_cfg.setter
    def pretrained_cfg(self, facts: Mapping[str, Any]) -> None:
        self.facts = {key: value for key, value in facts.items() if key != "clusters"}
        if "clusters" in facts:
            self.set_clusters(torch.tensor(facts["clusters"]))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal values of spread 0.02, divided by √(2 · depth) where a branch ends, as in transformers; no biases."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                ends = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.depth) ** 0.5 if ends else 0.02)

    def encode(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, H, W] → the numbers of the nearest colours, [B, H·W]."""
        dtype = torch.promote_types(self.clusters.dtype, torch.float32)
        return nearest(images.flatten(2).mT.to(dtype), self.clusters.to(dtype))

    def decode(self, codes: Tensor) -> Tensor:
        """Numbers of colours [B, H·W] → normalised images [B, C, H, W]."""
        return self.clusters[codes].mT.unflatten(2, sides(self.config.img_size))

    def inputs(self, codes: Tensor, classes: Tensor | None, start: int, stop: int) -> Tensor:
        """Token and position embeddings [B, stop − start, D]: step n has the token of step n − 1, step 0 the start."""
        tokens = codes[:, max(start - 1, 0) : stop - 1]
        if start == 0:
            first = codes.new_zeros(codes.shape[0]) if classes is None else classes
            tokens = torch.cat(((self.config.n_colors + first)[:, None], tokens), 1)
        return self.wte(tokens) + self.wpe.weight[start:stop]

    def final(self, x: Tensor) -> Tensor:
        return normalize(x, self.ln_f)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features [B, n, D] → logits of the colours [B, n, K]."""
        return x if pre_logits else self.lm_head(x)

    def probe_features(self, image: Tensor, block: int | None = None) -> Tensor:
        """Features for a linear classifier (section 2.3): a block's normalised input, averaged over the positions.

        `train.extract_features` and `train.ridge` take them: the linear probe.

        Args:
            image: normalised images [B, C, H, W], or codes [B, N].
            block: its number; None means the middle one.

        Returns:
            [B, D].
        """
        block = len(self.h) // 2 if block is None else block
        if not 0 <= block < len(self.h):
            raise ValueError(f"block is {block}; the model has {len(self.h)} blocks, so use 0 to {len(self.h) - 1}")
        classes = self.first_class(image, None)
        x = self.inputs(self.codes_of(image), classes, 0, self.num_positions)
        for earlier in list(self.h)[:block]:
            x = earlier(x)
        middle: Any = self.h[block]
        return normalize(x, middle.ln_1).mean(1)

    @torch.no_grad()
    def set_clusters(self, source: Tensor | str | os.PathLike) -> None:
        """Sets the colours.

        Args:
            source: [K, C], or a file: OpenAI's kmeans_centers.npy, or transformers' preprocessor_config.json.

        Raises:
            ValueError: the file cannot be read, or holds other than K colours of C finite numbers.
        """
        colours = source if isinstance(source, Tensor) else read_clusters(Path(source))
        wanted = tuple(self.clusters.shape)
        if tuple(colours.shape) != wanted or not bool(colours.isfinite().all()):
            what = "values that are not finite" if tuple(colours.shape) == wanted else f"shape {list(colours.shape)}"
            raise ValueError(f"clusters have {what}; this model takes {list(wanted)} finite numbers")
        self.clusters.copy_(colours)

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, the head if `head`."""
        self.h = self.h[:stages]
        if norm:
            self._modules["ln_f"] = nn.Identity()
        if head:
            self._modules["lm_head"] = nn.Identity()
        self.config = self.config.replace(depth=stages)


def uniform_colours(count: int, channels: int) -> Tensor:
    """Evenly spaced colours [count, channels] between −1 and 1: a grid if count is a power of its side, else greys."""
    side = round(count ** (1 / channels))
    if side**channels == count and side > 1:
        levels = torch.linspace(-1, 1, side)
        return torch.cartesian_prod(*[levels] * channels).reshape(count, channels)
    return torch.linspace(-1, 1, count)[:, None].expand(-1, channels).clone()


def nearest(pixels: Tensor, clusters: Tensor) -> Tensor:
    """The numbers of the nearest colours [...] of pixels [..., C]; the first of equally near ones."""
    return (clusters.square().sum(1) - 2 * pixels @ clusters.mT).argmin(
        -1
    )  # the pixel's own square is the same for all


def colour_clusters(images: Tensor, count: int = 512, seed: int = 0, steps: int = 50) -> Tensor:
    """Colours that represent the pixels of images best: Lloyd's k-means from seeds drawn as in k-means++.

    The paper's 512 colours are those of ImageNet's pixels (section 3.1), OpenAI's kmeans_centers.npy.
    """
    pixels, weights = images.movedim(1, -1).flatten(0, -2).double().unique(dim=0, return_counts=True)
    if not 0 < count <= len(pixels):
        raise ValueError(f"count is {count}, and the images have {len(pixels)} different pixels; use 1 to that many")
    generator = torch.Generator().manual_seed(seed)
    chosen = [pixels[int(torch.multinomial(weights.double(), 1, generator=generator))]]
    far = (pixels - chosen[0]).square().sum(1)
    while len(chosen) < count:
        chosen.append(pixels[int(torch.multinomial(weights * far, 1, generator=generator))])
        far = torch.minimum(far, (pixels - chosen[-1]).square().sum(1))
    clusters = torch.stack(chosen)
    codes = torch.full((len(pixels),), -1)
    for _ in range(steps):
        assignment = torch.cat([nearest(part, clusters) for part in pixels.split(65_536)])
        if bool((assignment == codes).all()):
            break
        codes = assignment
        sums = torch.zeros_like(clusters).index_add_(0, codes, pixels * weights[:, None])
        sizes = torch.zeros(count, dtype=torch.double).index_add_(0, codes, weights.double())
        clusters = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], clusters)
    return clusters.float()


def read_clusters(path: Path) -> Tensor:
    """The colours [K, C] in OpenAI's kmeans_centers.npy, or in transformers' preprocessor_config.json."""
    try:
        if path.suffix == ".npy":
            import numpy as np  # which reads its own format

            return torch.from_numpy(np.load(path, allow_pickle=False)).float()
        return torch.tensor(json.loads(path.read_text(encoding="utf-8"))["clusters"], dtype=torch.float32)
    except (OSError, ValueError, TypeError, LookupError) as error:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} holds no colours ({what}); give kmeans_centers.npy or preprocessor_config.json"
        ) from error


CONFIG = IGPTConfig
MODEL = IGPT
VARIANTS: dict[str, Options] = {
    "igpt_small": {},
    "igpt_medium": dict(embed_dim=1024, depth=36),
    "igpt_large": dict(embed_dim=1536, depth=48, num_heads=16),
    "igpt_digits": dict(img_size=14, in_chans=1, num_classes=10, n_colors=16, embed_dim=96, depth=4, num_heads=4),
}


# Names in checkpoints: transformers', whose linear layers are transposed (Conv1D), and OpenAI's variables.

TURNED = ("attn.c_proj", "mlp.c_fc.w", "mlp.c_proj.w")  # OpenAI's, [inputs, outputs]
PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def read_transposed(tensors: State) -> State:
    """transformers' tensors in our shapes; ours, whose packed projection has more rows than columns, as they are."""
    packed = tensors.get("h.0.attn.c_attn.weight")
    if packed is None or packed.dim() != 2 or packed.shape[0] > packed.shape[1]:
        return tensors
    return {key: tensor.mT if key.endswith(PROJECTIONS) else tensor for key, tensor in tensors.items()}


def write_transposed(tensors: State) -> State:
    """Our tensors in transformers' shapes, without the colours, which are in its preprocessor_config.json."""
    tensors = {key: tensor for key, tensor in tensors.items() if key != "clusters"}
    return {key: tensor.mT if key.endswith(PROJECTIONS) else tensor for key, tensor in tensors.items()}


def read_openai(tensors: State) -> State:
    """OpenAI's variables in our shapes: heads [H, d, D] are flattened, q, k, v joined, the start joins the colours."""
    tensors = dict(tensors)
    for key in [key for key in tensors if key.endswith("attn.q_proj")]:
        block = key.removesuffix("q_proj")
        tensors[f"{block}c_attn"] = torch.cat([tensors.pop(f"{block}{part}_proj").flatten(0, 1) for part in "qkv"])
        tensors[f"{block}c_proj"] = tensors[f"{block}c_proj"].flatten(0, 1)
    tensors["wte"] = torch.cat((tensors["wte"], tensors.pop("sos")[None]))
    return {key: tensor.mT if key.endswith(TURNED) else tensor for key, tensor in tensors.items()}


def write_openai(tensors: State) -> State:
    """The inverse of `read_openai`, whose heads stay flattened; raises WeightsError if there is no inverse."""
    written: State = {}
    for key, tensor in tensors.items():
        if key.endswith("bias"):
            if bool(tensor.any()):
                raise WeightsError(f"{key} is not zero, and OpenAI's models have no biases; use layout='transformers'")
        elif key.endswith("attn.c_attn"):
            block = key.removesuffix("c_attn")
            written |= {f"{block}{name}_proj": part for name, part in zip("qkv", tensor.chunk(3), strict=True)}
        elif key == "wte":
            if tensor.shape[0] != tensors["wtet"].shape[0] + 1:
                raise WeightsError("the model has a start for each class, and OpenAI's models have one start")
            written |= {"wte": tensor[:-1], "sos": tensor[-1]}
        elif key != "clusters":
            written[key] = tensor.mT if key.endswith(TURNED) else tensor
    return written


OPENAI = Layout(
    name="OpenAI",
    mark="h0.attn.q_proj",
    resize="bicubic",
    stem={"wte.weight": "wte", "wpe.weight": "wpe", "ln_f.weight": "ln_f.g", "lm_head.weight": "wtet"},
    home="h.{}",
    blocks="h{}",
    block={
        "ln_{1,2}.weight": "ln_{1,2}.g",
        "attn.c_attn.weight": "attn.c_attn",
        "attn.c_proj.weight": "attn.c_proj",
        "mlp.c_{fc,proj}.weight": "mlp.c_{fc,proj}.w",
    },
    read=read_openai,
    write=write_openai,
)
TRANSFORMERS = Layout(
    name="transformers ImageGPT",
    mark="h.0.attn.c_attn.weight",
    resize="bicubic",
    home="h.{}",
    blocks="h.{}",
    read=read_transposed,
    write=write_transposed,
    base="transformer.",
)


def fit_igpt(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Adds what a checkpoint lacks: the colours of the model, and biases of zero; nothing is resized."""
    if not any(key.endswith("bias") for key in state):  # OpenAI's
        state |= {key: torch.zeros_like(tensor) for key, tensor in target.items() if key.endswith("bias")}
    state.setdefault("clusters", target["clusters"].clone())
    return [], ""


def write_igpt(model: Any, state: State, layout: Layout) -> State:
    """Our tensors under the names of a layout: of transformers' class with a head, or OpenAI's variables."""
    if layout is OPENAI:
        H = model.config.num_heads
        theirs = layout.convert(state, (), 0)
        theirs |= {key: t.unflatten(0, (H, -1)) for key, t in theirs.items() if re.search(r"attn\.\w_proj$", key)}
        return {f"model/{key.replace('.', '/')}": tensor for key, tensor in theirs.items()}
    return layout.convert(state, ("lm_head",), 1)


SKIPPED = r"(^|\.)attn\.(masked_)?bias$|adam_[mv]|AdamWeightDecay|global_step|(^|\.)_step$"  # masks, and training state
CHECKPOINTS = CheckpointFormats(
    "iGPT", (OPENAI, TRANSFORMERS), fit_igpt, {"transformers": (TRANSFORMERS,), "openai": (OPENAI,)},
    write=write_igpt, irrelevant=re.compile(SKIPPED),
)  # fmt: skip
