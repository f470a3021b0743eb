"""Tests of causal attention in converted modules of other packages. Oracle: the same modules before `optimize`."""

import copy

import pytest
import timm
import torch
import transformers
from catalogue.comparison import EXACT, SINGLE, distance, distances
from catalogue.entry import redraw
from torch import nn

from fastvit_triton import explain, optimize
from fastvit_triton.convert.readers.transformers import imagegpt
from fastvit_triton.engine import attention as engine

TEXT = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=9)
GPT = dict(n_embd=24, n_layer=2, n_head=2, n_positions=6, vocab_size=9, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
GPT |= dict(scale_attn_by_inverse_layer_idx=True)
TOKENS = dict(input_ids=torch.tensor([[1, 2, 3, 4, 8], [3, 1, 8, 0, 0]]))
PADDED = dict(attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
EARLIER = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
HIDDEN = torch.zeros(2, 5, dtype=torch.float64).masked_fill(PADDED["attention_mask"] == 0, -torch.inf)
CAUSAL = dict(attn_mask=EARLIER, is_causal=True, need_weights=False)


def clip_text():
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT, eos_token_id=8))


def image_gpt():
    return transformers.ImageGPTModel(transformers.ImageGPTConfig(**GPT))


def states(**given):
    """The hidden states of a model for the tokens."""
    return lambda model, x: model(**TOKENS, **given).last_hidden_state


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# constructor, call, and the number of causal calls of our attention
MODELS = {
    "CLIP's text tower": (clip_text, states(), 2),
    "CLIP's text tower, padded": (clip_text, states(**PADDED), 0),  # the mask holds causality
    "ImageGPT": (image_gpt, states(use_cache=False), 2),
    "ImageGPT, padded": (image_gpt, states(use_cache=False, **PADDED), 2),
    "ImageGPT with a cache": (image_gpt, states(), 2),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        lambda model, x: model(x, x, x, **CAUSAL)[0],
        1,
    ),
    "MultiheadAttention, tokens first": (
        lambda: nn.MultiheadAttention(24, 3),
        lambda model, x: model(*[x.transpose(0, 1)] * 3, **CAUSAL)[0],
        1,
    ),
    "MultiheadAttention of two sequences": (
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        lambda model, x: model(x, x.sin(), x.cos(), **CAUSAL)[0],
        1,
    ),
    "MultiheadAttention, fewer keys": (
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        lambda model, x: model(x, *[x[:, :3]] * 2, **CAUSAL | dict(attn_mask=EARLIER[:, :3]))[0],
        0,
    ),
    "MultiheadAttention, padded": (
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        lambda model, x: model(x, x, x, **CAUSAL, key_padding_mask=HIDDEN)[0],
        0,
    ),
    "MultiheadAttention with its weights": (
        lambda: nn.MultiheadAttention(24, 3, batch_first=True),
        lambda model, x: torch.cat([t.flatten() for t in model(x, x, x, **CAUSAL | dict(need_weights=True))]),
        0,
    ),
    "TransformerEncoder": (encoder, lambda model, x: model(x, EARLIER, is_causal=True), 2),
    "TransformerEncoder that finds it": (encoder, lambda model, x: model(x, EARLIER), 2),
    "timm": (
        lambda: timm.models.vision_transformer.Block(24, 2, qk_norm=True),
        lambda model, x: model(x, is_causal=True),
        1,
    ),
    "timm, written out": (
        lambda: written_out(timm.models.vision_transformer.Block(24, 2)),
        lambda model, x: model(x, is_causal=True),
        1,
    ),
    "timm with RoPE": (
        lambda: timm.layers.AttentionRope(24, 2),
        lambda model, x: model(x, torch.linspace(-1, 1, 4 * 24, dtype=x.dtype).view(4, 24), is_causal=True),
        1,
    ),
}


def written_out(block):
    block.attn.fused_attn = False
    return block


@pytest.fixture
def causal_calls(monkeypatch):
    """The value of `causal` in each call of attention by the engine and its readers."""
    calls = []

    def counted(function):
        def call(*arguments, causal=False, **named):
            calls.append(causal)
            return function(*arguments, causal=causal, **named)

        return call

    from fastvit_triton.convert.readers import torch as reader

    monkeypatch.setattr(engine, "attention_qkv", counted(engine.attention_qkv))
    for module in (engine, reader, imagegpt):
        monkeypatch.setattr(module, "attention", counted(module.attention))
    return calls


def results(model, call, x):
    x = x.clone().requires_grad_()
    y = call(model, x)
    (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return y.detach(), [t.grad for t in (x, *model.parameters())]


@pytest.mark.few(26)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_converted_causal_attention_equals_the_original(name, train, causal_calls, references):
    """Oracle: the untouched module in float64, its output and every gradient; and how many calls were causal."""
    make, call, count = MODELS[name]
    torch.manual_seed(1)
    plain = redraw(make()).double().train(train)
    model, x = copy.deepcopy(plain), torch.randn(2, 5, 24, dtype=torch.float64)
    optimize(model)
    assert max(distances(results(model, call, x), results(plain, call, x))) <= EXACT
    assert sum(causal_calls) == count
    with torch.no_grad():
        assert distance(call(model, x), call(plain, x)) <= EXACT


@pytest.mark.parametrize("inference", [False, True])
def test_a_written_mask_of_imagegpt_is_obeyed(inference, causal_calls, references):
    """Oracle: the untouched model with the same mask, which lets tokens see later ones; also of inference tensors."""
    with torch.inference_mode(inference):
        plain = redraw(image_gpt()).double().eval()
        model, call = copy.deepcopy(plain), states(use_cache=False)
        optimize(model)
        before = call(model, None)
        for each in (plain, model):
            each.h[0].attn.bias[..., 4] = False
        after = call(model, None)
        assert sum(causal_calls) == 3 and not torch.equal(before, after)
        assert distance(after, call(plain, None)) <= EXACT


def test_imagegpt_continues_from_a_cache(references):
    """Oracle: the hidden states of all tokens in one call of the untouched model."""
    plain = redraw(image_gpt()).double().eval()
    model, ids = copy.deepcopy(plain), TOKENS["input_ids"]
    optimize(model)
    with torch.no_grad():
        want = plain(ids, use_cache=False).last_hidden_state
        first = model(ids[:, :3], use_cache=True)
        rest = model(ids[:, 3:], past_key_values=first.past_key_values, use_cache=True)
    assert distance(torch.cat((first.last_hidden_state, rest.last_hidden_state), 1), want) <= EXACT


@pytest.mark.parametrize("mask", [None, EARLIER])
def test_captured_maps_are_causal(mask, references):
    """Oracle: softmax of the scores of each query with the keys up to its own, from the layer's weights."""
    block = redraw(timm.models.vision_transformer.Block(24, 2)).double().eval()
    given = dict(is_causal=True) if mask is None else dict(attn_mask=mask)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    optimize(block)
    with torch.no_grad(), explain.capture(block) as seen:
        block(x, **given)
        q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    (layer,) = seen.layers
    want = (q @ k.mT * 12**-0.5 + EARLIER).softmax(-1)
    assert distance(layer.map(), want) <= SINGLE  # L is in float32
