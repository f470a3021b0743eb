"""Tests of captured attention on every model of the catalogue, against its own softmaxes with attention written out."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from catalogue import MODELS, build, inputs, outputs
from interpreter import interpreting
from recording import Recorder
from test_convert import single
from test_explain import hooks, within
from torch import nn
from torch.utils._pytree import tree_map

from fastvit_triton import explain, optimize

NONE = ("mlp_sequential", "timm_coat", "timm_convnext_v2", "hf_Lfm3VlVisionModel")  # no softmax multiplies values there
# softmaxes that are computed and not used, pool the tokens by one number each, or assign them to groups
OTHERS = {"hf_Sam2VisionModel": 6, "vit_pytorch_cct": 1, "hf_GroupViTVisionModel": 4}
MIXED = ("timm_cait", "vit_pytorch_cait", "vit_pytorch_deepvit")  # heads are mixed after the softmax


@contextmanager
def written_out():
    """Yields a list that fills with the results of every softmax; attention is written out, and has one."""
    found, softmax, attention = [], torch.Tensor.softmax, F.scaled_dot_product_attention

    def looking(x, *given, **named):
        found.append(softmax(x, *given, **named))
        return found[-1]

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert not dropout_p
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return scores.softmax(-1).nan_to_num() @ v

    torch.Tensor.softmax, torch.softmax, F.scaled_dot_product_attention = looking, looking, attend
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield found
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        del torch.Tensor.softmax
        torch.softmax, F.scaled_dot_product_attention = ORIGINAL, attention


ORIGINAL = torch.softmax


def last_call(model, given):
    """The output of one call; a lone attention is called with the same queries, keys and values."""
    torch.manual_seed(1)  # ViLT draws the patches that it keeps
    return model(given, given, given)[0] if isinstance(model, nn.MultiheadAttention) else outputs(model, given)


def maps_like(shape, found):
    """A softmax's result in the layout [G, H, N, M] of a layer, or None: windows may be in the third axis."""
    if found.shape[-2:] != shape[-2:]:
        return None
    found = found.nan_to_num()
    if found.dim() == 5 and found.shape[1] == shape[1] and found.shape[1] * found.shape[2] != shape[1]:
        found = found.movedim(2, 1)
    if found.numel() == shape.numel():
        return found.reshape(shape)
    return found.expand(shape) if found.dim() == 3 and found.shape[0] == shape[1] else None


WAYS = ("plain", "optimised", "kernels")
CASES = [(name, WAYS[i % 3]) for i, name in enumerate(MODELS) if name not in NONE]


@pytest.mark.few(5)
@pytest.mark.parametrize("name, way", CASES)
@torch.no_grad()
def test_maps_are_the_softmaxes_of_the_model(name, way):
    """Oracle: every softmax in float64, with attention written out; those that are no layer's are named in `left`.
    Outputs are as without capture, and no kernel of ours runs."""
    plain, given = build(name).eval().float(), inputs(name)
    truth, model = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    given = tree_map(lambda t: single(t) if isinstance(t, torch.Tensor) else t, given)
    exactly = tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, given)
    if way != "plain":
        optimize(model)
    with written_out() as want:
        last_call(truth, exactly)
    with written_out() as baseline:
        expected = last_call(plain, given)
    before = hooks(model)
    with interpreting() if way == "kernels" else torch.no_grad(), Recorder() as run, explain.capture(model) as seen:
        y = last_call(model, given)
    assert not run.ours and hooks(model) == before
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    unused = list(zip(baseline, want, strict=True))
    for layer in seen.layers:
        got = layer.map()
        pairs = [[maps_like(got.shape, t) for t in pair] for pair in unused]
        place = next(i for i, (one, _) in enumerate(pairs) if one is not None)
        unused.pop(place)
        one, exact = pairs[place]
        if name not in MIXED and (exact != exact.flatten()[0]).any():
            within(got, one, exact)
        elif name not in MIXED:  # X-CLIP's tokens of a frame are alike
            torch.testing.assert_close(got, one)
    assert len(unused) == OTHERS.get(name, len(seen.left)), seen.left
