"""Weights of models that mix convolutions and attention: names in other libraries.

Our names are those of timm and, where it lacks the model, the authors'. No tensor of a CvT depends on the image's size.

Sources: state dicts of transformers 5.23; microsoft/CvT (lib/models/cls_cvt.py).
"""

import re

from . import pyramid
from .layouts import Layout


def _from_cvt(key: str) -> str:
    """Stages and their blocks have shorter paths in the authors' code."""
    key = re.sub(r"^encoder\.stages\.(\d+)\.", r"stage\1.", key)
    key = re.sub(r"^(stage\d+)\.layers\.", r"\1.blocks.", key)
    key = key.replace("embedding.convolution_embeddings.projection", "patch_embed.proj")
    return key.replace("embedding.convolution_embeddings.normalization", "patch_embed.norm")


CONVOLVED = "attention.attention.convolution_projection_{{query,key,value}}.convolution_projection.{}"
CVT_LAYOUTS = (
    Layout(
        name="transformers CvT",
        mark="encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        resize="bilinear",
        number=_from_cvt,
        stem={"norm": "layernorm", "head": "classifier"},
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
        block={
            "norm{1,2}": "layernorm_{before,after}",
            "attn.conv_proj_{q,k,v}.conv": CONVOLVED.format("convolution"),
            "attn.conv_proj_{q,k,v}.bn": CONVOLVED.format("normalization"),
            "attn.proj_{q,k,v}": "attention.attention.projection_{query,key,value}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "{intermediate,output}.dense",
        },
        base="cvt.",
    ),
    Layout(
        name="CvT",
        mark="stage0.patch_embed.proj.weight",
        resize="bilinear",
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
    ),
)

ROWS: dict[str, tuple] = {  # see `Spelling`
    "cvt": ("CvT", CVT_LAYOUTS, pyramid.keep, {}, pyramid.write),
}
