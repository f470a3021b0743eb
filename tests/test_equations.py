"""Tests of the package against the code snippets and equations by which ViT is usually taught.

A snippet is transcribed as printed, with explicit imports, and both sides get the same weights.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from agreement import normal
from budget import telling
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from timm.layers import DropPath
from torch import nn

from fastvit_triton import ViTConfig, create_model, explain
from fastvit_triton.layers import (
    Attention,
    Block,
    LinearPatchEmbed,
    Mlp,
    NormPatchEmbed,
    PatchEmbed,
    Peg,
    PostNormBlock,
    resize_pos_embed,
    sincos1d,
    sincos2d,
)
from fastvit_triton.layers.resnet import StdConv2d
from fastvit_triton.models.transformer import VisionTransformer
from fastvit_triton.train.loss import hard_distillation, soft_distillation

pytestmark = pytest.mark.fast

EPS = torch.finfo(torch.float64).eps


def same(got: torch.Tensor, want: torch.Tensor, constant: bool = False) -> bool:
    """True if within 200 float64 roundings of the largest value: sums of some hundred terms in another order."""
    got, want = got.detach(), telling(want.detach(), constant)
    return got.shape == want.shape and float((got - want).abs().max()) <= 200 * EPS * max(1.0, float(want.abs().max()))


def random_(module: nn.Module) -> nn.Module:
    """Sets all weights to random float64 values; returns the module."""
    return normal(module.double())


def copied(ours: nn.Module, theirs: nn.Module, renames: dict[str, str] | None = None) -> None:
    """Loads their weights into our module; `renames` replaces parts of their keys."""
    state = theirs.state_dict()
    for old, new in (renames or {}).items():
        state = {key.replace(old, new): value for key, value in state.items()}
    ours.double().load_state_dict(state)


def same_gradients(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> bool:
    """True if outputs, input gradients and, sorted by size, all parameter gradients agree."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(i) for module, i in zip((ours, theirs), inputs, strict=True)]
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights).sum().backward()
    sums = [sorted(float(p.grad.square().sum()) for p in m.parameters()) for m in (ours, theirs)]
    return same(*outputs) and same(inputs[0].grad, inputs[1].grad) and sums[0] == pytest.approx(sums[1], rel=1e-9)


def vit(**options) -> VisionTransformer:
    """A small float64 ViT with random weights, in eval mode."""
    shape = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    return random_(VisionTransformer(ViTConfig(**(shape | options)))).eval()


# Patches and projection


class SnippetPatchEmbed(nn.Module):
    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768):
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.num_patches = (img_size // patch_size) * (img_size // patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=self.patch_size, stride=self.patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("size, patch, tokens", [((224, 224), 16, 196), ((256, 256), 32, 64), ((384, 384), 16, 576)])
@pytest.mark.parametrize("stem", [PatchEmbed, LinearPatchEmbed])
def test_patch_counts(size, patch, tokens, stem):
    """N = H·W / P²."""
    embed = stem(size, (patch, patch), 3, 4)
    assert embed.num_patches == tokens and embed(torch.zeros(1, 3, *size)).shape == (1, tokens, 4)


@pytest.mark.parametrize(
    "size, patch, grid", [((518, 518), 14, (37, 37)), ((32, 48), 16, (2, 3)), ((320, 320), 16, (20, 20))]
)
def test_patch_grids(size, patch, grid):
    """N_h = H / P and N_w = W / P, square or not."""
    assert PatchEmbed(size, (patch, patch), 3, 4).grid_size == grid


def test_patch_embed_snippet():
    """Convolution with kernel = stride = P, flattened."""
    theirs, ours = random_(SnippetPatchEmbed(32, 8, 3, 12)), PatchEmbed((32, 32), (8, 8), 3, 12)
    copied(ours, theirs)
    assert same_gradients(ours, theirs, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert same(ours.proj(image).flatten(2).mT, ours(image))  # as a module, too
    with pytest.raises(ValueError, match="image is 24x32 pixels, the model takes 32x32"):
        ours(torch.zeros(1, 3, 24, 32, dtype=torch.float64))


def test_conv_stem_is_the_linear_stem_with_permuted_columns():
    """x_i = flatten(patch_i) E with flatten in (row, column, channel) order: E = w.permute(2, 3, 1, 0)."""
    conv, linear = random_(PatchEmbed((8, 12), (4, 4), 3, 6)), LinearPatchEmbed((8, 12), (4, 4), 3, 6).double()
    with torch.no_grad():
        linear.proj.weight.copy_(conv.proj.weight.permute(0, 2, 3, 1).flatten(1))
        linear.proj.bias.copy_(conv.proj.bias)
    image = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    assert same(conv(image), linear(image))


def test_norm_linear_norm_snippet():
    """Rearrange, LayerNorm, Linear, LayerNorm; class token first; positions added to all."""
    dim, patch_dim = 24, 8 * 8 * 3
    to_patch_embedding = random_(
        nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=8, p2=8),
            nn.LayerNorm(patch_dim),
            nn.Linear(patch_dim, dim),
            nn.LayerNorm(dim),
        )
    )
    cls_token, pos_embedding = torch.randn(1, 1, dim).double(), torch.randn(1, 17, dim).double()
    img = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    x = to_patch_embedding(img)
    b, n, _ = x.shape
    cls_tokens = repeat(cls_token, "1 1 d -> b 1 d", b=b)
    x = torch.cat((cls_tokens, x), dim=1)
    x += pos_embedding[:, : (n + 1)]
    ours = NormPatchEmbed((32, 32), (8, 8), 3, dim)
    copied(ours, to_patch_embedding, {"1.": "norm_in.", "2.": "proj.", "3.": "norm_out."})
    assert same(ours(img, pos_embedding, cls_token), x)
    assert type(vit(patch_embed="norm_linear_norm").patch_embed) is NormPatchEmbed


# Tokens and positions


def test_class_token_is_first_and_is_read():
    """z_0 = [x_class; x_1 E; …] + E_pos; y is token 0 after the last norm; both tables learn."""
    model = vit()
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    embedded = {}
    model.blocks.register_forward_pre_hook(lambda _, args: embedded.update(z0=args[0]))
    features = model.forward_features(image)
    patches = model.patch_embed.proj(image).flatten(2).transpose(1, 2)
    want = torch.cat((model.cls_token.expand(2, -1, -1), patches), 1) + model.pos_embed
    assert same(embedded["z0"], want)
    assert same(model(image), model.head(features[:, 0]))
    model(image).sum().backward()
    assert model.cls_token.grad.abs().sum() > 0 and model.pos_embed.grad.abs().sum() > 0
    for scheme, token in (("timm", 1e-6), ("jax", 0.0)):
        fresh = create_model("vit_tiny_patch16_224", weight_init=scheme, depth=1)
        error = 6 * 0.02 / (2 * fresh.pos_embed.numel()) ** 0.5  # six standard errors of a standard deviation
        assert abs(fresh.pos_embed.std().item() - 0.02) < error and fresh.cls_token.abs().max() <= 6 * token
    assert create_model("vit_tiny_patch16_224", depth=1).config.weight_init == "timm"


def test_adding_positions_before_the_class_token_needs_a_shorter_table():
    """The order of a well-known snippet, N + 1 positions on N patches, cannot run; `no_embed_class` has N rows."""
    model, image = vit(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        model.patch_embed(image) + model.pos_embed
    with pytest.raises(ValueError, match=r"axis N of pos must be 16 \(patches\) or 17 \(with prefix\), got 18"):
        model.patch_embed(image, torch.zeros(1, 18, 24).double(), model.cls_token)
    before = vit(no_embed_class=True)
    tokens = before.patch_embed(image, before.pos_embed, before.cls_token)
    assert before.pos_embed.shape == (1, 16, 24)
    assert same(tokens, torch.cat((before.cls_token, before.patch_embed(image) + before.pos_embed), 1))


def test_attention_without_positions_is_equivariant():
    """Permuting patches permutes their outputs and leaves the class token's output unchanged; positions break this."""
    order = torch.randperm(16)
    for pos_embed, invariant in (("none", True), ("learned", False)):
        model = vit(pos_embed=pos_embed)
        patches = torch.randn(1, 16, 24, dtype=torch.float64)

        def features(x, model=model):
            x = torch.cat((model.cls_token, x), 1)
            return model.norm(model.blocks(x if model.pos_embed is None else x + model.pos_embed))

        plain, permuted = features(patches), features(patches[:, order])
        assert same(plain[:, 0], permuted[:, 0]) is invariant
        assert same(plain[:, 1:][:, order], permuted[:, 1:]) is invariant


@torch.no_grad()
def test_convolution_commutes_with_translation_and_attention_with_positions_does_not():
    """Oracle: f(g(x)) = g(f(x)) for translations g of a periodic image, the bias that CNNs have and ViTs lack."""
    x = torch.randn(2, 5, 6, 8, dtype=torch.float64)  # [B, H, W, D]
    convolution, attention = Peg(8, "circular").double(), Attention(8, 2).double()
    position = torch.randn(30, 8, dtype=torch.float64)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return attention(x.flatten(1, 2) + position).unflatten(1, (5, 6))

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.roll((2, 1), (1, 2))

    assert same(convolution(move(x)), move(convolution(x)))
    assert (attend(move(x)) - move(attend(x))).norm() > 0.1 * attend(x).norm()


def test_sincos1d_formula():
    """PE(n, 2i) = sin(n / 10000^(2i/D)), PE(n, 2i + 1) = cos of the same."""
    table = sincos1d(7, 6)[0]
    for n in range(7):
        for i in range(3):
            angle = n / 10000 ** (2 * i / 6)
            assert table[n, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert table[n, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert torch.equal(vit(pos_embed="sincos1d").pos_embed.float(), sincos1d(17, 24))


def test_sincos2d_formula():
    """SimpleViT's table with divisor D/4 − 1, entry by entry; not a parameter."""
    table = sincos2d((2, 3), 12)[0].view(2, 3, 12)
    for y in range(2):
        for x in range(3):
            for k in range(3):
                omega = 1 / 10000 ** (k / 2)
                want = [f(v * omega) for v in (x, y) for f in (math.sin, math.cos)]
                assert table[y, x, k::3].tolist() == pytest.approx(want, abs=1e-7)
    model = create_model("simplevit_tiny_patch16_224", depth=1)
    assert "pos_embed" not in model.state_dict() and model.cls_token is None


def test_sines_of_two_dimensions_are_similar_in_rows_and_columns():
    """Oracle: cos(a − b) = cos a cos b + sin a sin b: the cosine of two entries is ½ f(Δcolumn) + ½ f(Δrow), with
    f(Δ) the mean of cos(ω_k Δ); so every tile of the figure is a cross, and has its largest value at its own place."""
    similar = explain.position_similarity(sincos2d((5, 7), 24)[0].double(), (5, 7))
    omega = 10000 ** (-torch.arange(6, dtype=torch.float64) / 5)
    f = torch.cos(omega * torch.arange(7)[:, None]).mean(1)
    rows, columns = torch.arange(5), torch.arange(7)
    row, column = (f[(at[:, None] - at).abs()] / 2 for at in (rows, columns))
    want = row[:, None, :, None] + column[None, :, None, :]
    # entries are sines and cosines in float32, each rounded once, in a sum of products that is divided by its norm
    assert float((similar - want).abs().max()) <= 4 * torch.finfo(torch.float32).eps
    assert (similar.flatten(2).argmax(-1) == torch.arange(35).view(5, 7)).all()


def test_learned2d_is_a_row_and_a_column_table():
    """Entry (y, x) is [column x; row y]."""
    model = vit(pos_embed="learned2d", img_size=(16, 24))
    table = model.positions((2, 3))[0].view(2, 3, 24)
    for y in range(2):
        for x in range(3):
            assert torch.equal(table[y, x], torch.cat((model.pos_embed.column[x], model.pos_embed.row[y])))


def test_relative_positions_add_q_dot_r():
    """scores(n, m) = scale · (q_n · k_m + q_n · r_{n−m}) between patches, and plain scores with the class token."""
    model = vit(pos_embed="relative", depth=1)
    attn = model.blocks[0].attn
    x = torch.randn(1, 17, 24, dtype=torch.float64)
    q, k, v = attn.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT
    for n in range(16):
        for m in range(16):
            scores[..., n + 1, m + 1] += q[:, :, n + 1] @ attn.position.weight[n - m + 15]
    want = attn.proj(((scores * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert same(attn(x), want)


def snippet_resize_pos_embed(posemb, posemb_new):
    ntok_new = posemb_new.shape[1]
    posemb_tok, posemb_grid = posemb[:, :1], posemb[0, 1:]
    ntok_new -= 1
    gs_old = int(math.sqrt(len(posemb_grid)))
    gs_new = int(math.sqrt(ntok_new))
    posemb_grid = posemb_grid.reshape(1, gs_old, gs_old, -1).permute(0, 3, 1, 2)
    posemb_grid = F.interpolate(posemb_grid, size=(gs_new, gs_new), mode="bilinear")
    posemb_grid = posemb_grid.permute(0, 2, 3, 1).reshape(1, gs_new * gs_new, -1)
    return torch.cat([posemb_tok, posemb_grid], dim=1)


@pytest.mark.parametrize("old, new", [(14, 24), (14, 20), (7, 7), (24, 14)])
def test_resize_pos_embed_snippet(old, new):
    """Bilinear, align_corners=False; the class token's position is not resized."""
    table = torch.randn(1, 1 + old * old, 8)
    got = resize_pos_embed(table, (old, old), (new, new), 1, "bilinear")
    assert torch.equal(got, snippet_resize_pos_embed(table, torch.empty(1, 1 + new * new, 8)))
    assert torch.equal(got[:, :1], table[:, :1])


# Attention, MLP, block


class SnippetAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, qk_scale=None, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = qk_scale or head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        return self.proj_drop(x)


class SnippetMlp(nn.Module):
    def __init__(self, in_features, hidden_features=None, out_features=None, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        out_features = out_features or in_features
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, out_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop(x)
        x = self.fc2(x)
        return self.drop(x)


class SnippetBlock(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio=4.0, qkv_bias=False, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SnippetAttention(dim, num_heads=num_heads, qkv_bias=qkv_bias)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = SnippetMlp(in_features=dim, hidden_features=int(dim * mlp_ratio))

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, dict(qkv_bias=True), dict(qk_scale=0.7)], ids=str)
def test_attention_snippet(options):
    """Packed qkv, scaled scores, softmax, merge, project."""
    theirs = random_(SnippetAttention(24, 3, **options))
    ours = Attention(24, 3, qkv_bias=options.get("qkv_bias", False), scale=options.get("qk_scale"))
    copied(ours, theirs)
    assert same_gradients(ours, theirs, X)


def test_attention_per_head():
    """head_h = softmax(Q_h K_hᵀ / √d) V_h with D x d matrices cut from the packed weight; concat · W_O."""
    attn = random_(Attention(24, 3, qkv_bias=False))
    w = attn.qkv.weight.view(3, 3, 8, 24)  # [q k v, head, d, D]
    heads = []
    for h in range(3):
        q, k, v = (X @ w[i, h].T for i in range(3))
        heads.append(torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v)
    assert same(attn(X), torch.cat(heads, -1) @ attn.proj.weight.T + attn.proj.bias)


def test_attention_dropout_snippet():
    """Dropout on probabilities keeps their expectation: the mean over many draws is the undropped output."""
    attn = random_(Attention(24, 3, attn_drop=0.25))
    exact = attn.eval()(X)
    draws = torch.stack([attn.train()(X) for _ in range(600)])
    assert not torch.equal(draws[0], draws[1])
    # six standard errors of the mean, element by element
    assert ((draws.mean(0) - exact).abs() <= 6 * draws.std(0) / 600**0.5 + 1e-12).all()


def test_mlp_snippet():
    """fc1, GELU, dropout, fc2, dropout with the same random numbers; D → 4 D → D."""
    for drop in (0.0, 0.3):
        theirs, ours = random_(SnippetMlp(24, 96, drop=drop)), Mlp(24, 96, drop=drop)
        copied(ours, theirs)
        outputs = []
        for module in (ours, theirs):
            torch.manual_seed(3)
            outputs.append(module.train()(X))
        assert same(*outputs) and (drop == 0.0) == same(outputs[0], ours.eval()(X))
        assert same_gradients(ours, theirs.eval(), X)
    w1, b1, w2, b2 = (p for p in (ours.fc1.weight, ours.fc1.bias, ours.fc2.weight, ours.fc2.bias))
    hidden = X @ w1.T + b1
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    assert same(ours(X), gelu @ w2.T + b2)


def test_mlp_is_local():
    """The MLP acts on each token alone: it commutes with any shift of the tokens, and one alone gives the same."""
    mlp = random_(Mlp(24, 48))
    assert same(mlp(X).roll(2, 1), mlp(X.roll(2, 1)))
    assert same(mlp(X)[:, 2:3], mlp(X[:, 2:3]))


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_block_snippet(drop_path):
    """x + drop_path(attn(norm1 x)), then x + drop_path(mlp(norm2 x)), with the same mask drawn twice; timm's drop_path.

    Both in training and in evaluation mode.
    """
    theirs = random_(SnippetBlock(24, 3, qkv_bias=True, drop_path=drop_path)).train()
    ours = Block(24, Attention(24, 3), Mlp(24, 96), eps=1e-5, drop_path=drop_path).train()
    copied(ours, theirs)
    outputs = []
    for module in (ours, theirs):
        torch.manual_seed(3)
        outputs.append(module(X))
    assert same(*outputs)
    assert drop_path or same_gradients(ours, theirs, X)
    assert same_gradients(ours.eval(), theirs.eval(), X)


def test_equations_1_to_4():
    """The whole network from its equations, in float64: embed, L blocks, norm, head."""
    model, image = vit(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    state = model.state_dict()

    def norm(z, name):
        mean, var = z.mean(-1, keepdim=True), z.var(-1, keepdim=True, correction=0)
        return (z - mean) / (var + 1e-6).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def affine(z, name):
        return z @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patches = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    z = patches @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    z = torch.cat((state["cls_token"].expand(2, -1, -1), z), 1) + state["pos_embed"]  # (1)
    for i in range(2):
        q, k, v = (
            affine(norm(z, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").view(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        )
        heads = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
        z = affine(heads.transpose(1, 2).reshape(2, 17, 24), f"blocks.{i}.attn.proj") + z  # (2)
        hidden = affine(norm(z, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")
        z = affine(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), f"blocks.{i}.mlp.fc2") + z  # (3)
    y = norm(z, "norm")[:, 0]  # (4)
    assert same(model(image), affine(y, "head"))
    assert same(model(image).softmax(-1).sum(-1), torch.ones(2, dtype=torch.float64), constant=True)


def test_post_norm_is_the_original_transformer():
    """Z' = LN(Z + MSA(Z)), Z_out = LN(Z' + FFN(Z')): torch.nn.TransformerEncoderLayer(norm_first=False)."""
    theirs = nn.TransformerEncoderLayer(24, 3, 96, 0.0, "gelu", 1e-6, batch_first=True, norm_first=False)
    ours = PostNormBlock(24, Attention(24, 3), Mlp(24, 96))
    renames = {
        "self_attn.in_proj_weight": "attn.qkv.weight",
        "self_attn.in_proj_bias": "attn.qkv.bias",
        "self_attn.out_proj": "attn.proj",
        "linear1": "mlp.fc1",
        "linear2": "mlp.fc2",
    }
    copied(ours, random_(theirs), renames)
    assert same_gradients(ours, theirs, X)
    model = vit(norm="post")
    assert type(model.blocks[0]) is PostNormBlock and type(model.norm) is nn.Identity


# The other common teaching implementation


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x):
        return self.net(x)


class SurveyAttention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        project_out = not (heads == 1 and dim_head == dim)
        self.heads = heads
        self.scale = dim_head**-0.5
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout)) if project_out else nn.Identity()

    def forward(self, x):
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.dropout(self.attend(dots))
        out = rearrange(torch.matmul(attn, v), "b h n d -> b n (h d)")
        return self.to_out(out)


class SurveyTransformer(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, mlp_dim, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        PreNorm(dim, SurveyAttention(dim, heads=heads, dim_head=dim_head, dropout=dropout)),
                        PreNorm(dim, FeedForward(dim, mlp_dim, dropout=dropout)),
                    ]
                )
            )

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


@pytest.mark.parametrize("heads, dim_head", [(3, 8), (2, 16), (1, 24)])
def test_survey_transformer(heads, dim_head):
    """No qkv bias, inner width H·d that may differ from D, no projection for one full head, no final norm."""
    theirs = random_(SurveyTransformer(24, 2, heads, dim_head, 40))

    def block():
        attn = Attention(24, heads, dim_head, qkv_bias=False)
        if (heads, dim_head) == (1, 24):
            attn.proj = nn.Identity()
        return Block(24, attn, Mlp(24, 40), eps=1e-5)

    ours = nn.Sequential(block(), block())
    renames = {
        "layers.": "",
        ".0.norm": ".norm1",
        ".1.norm": ".norm2",
        ".0.fn.to_qkv": ".attn.qkv",
        ".0.fn.to_out.0": ".attn.proj",
        ".1.fn.net.0": ".mlp.fc1",
        ".1.fn.net.3": ".mlp.fc2",
    }
    copied(ours, theirs, renames)
    assert same_gradients(ours, theirs, X)
    assert type(vit(final_norm=False).norm) is nn.Identity


# Heads, sizes, resolutions


def test_shape_walk_of_the_worked_example():
    """256x256x3 at P = 32: 64 patches of 3072 values → 64 x 1024 → 65 x 1024 → 65 x 1024."""
    model = create_model("vit_large_patch32_224", img_size=256, depth=1, num_classes=0)
    seen = []
    model.blocks.register_forward_hook(lambda _, args, out: seen.extend((args[0].shape, out.shape)))
    image = torch.zeros(1, 3, 256, 256)
    assert model.patch_embed.proj.weight[0].numel() == 3072
    assert model.patch_embed(image).shape == (1, 64, 1024)
    model(image)
    assert seen == [(1, 65, 1024)] * 2


def test_base_shapes_of_the_paper_note():
    """196 patches of 768 values, 197 tokens, 12 heads of 64, hidden layer 3072 (not 3012)."""
    model = create_model("vit_base_patch16_224", depth=1)
    attn = model.blocks[0].attn
    assert (model.patch_embed.num_patches, model.patch_embed.proj.weight[0].numel()) == (196, 768)
    assert (model.pos_embed.shape[1], attn.num_heads, attn.head_dim) == (197, 12, 64)
    assert model.blocks[0].mlp.fc1.out_features == 3072


def test_heads_have_64_channels():
    """Oracle: hooks see q, k and v of 12 heads, 197 x 64 each, and the heads joined to 197 x 768."""
    model, seen = create_model("vit_base_patch16_224", depth=1), {}
    attn = model.blocks[0].attn
    attn.qkv.register_forward_hook(lambda _, args, out: seen.update(qkv=out))
    attn.proj.register_forward_hook(lambda _, args, out: seen.update(heads=args[0], out=out))
    model(torch.zeros(1, 3, 224, 224))
    assert seen["qkv"].view(1, 197, 3, attn.num_heads, attn.head_dim).shape == (1, 197, 3, 12, 64)
    assert seen["heads"].shape == seen["out"].shape == (1, 197, 768)


def parameters(D: int, hidden: int, depth: int, patch: int, classes: int = 1000) -> int:
    """Parameters of a ViT at 224 pixels, from its equations."""
    stem, tokens = (3 * patch**2 + 1) * D, (224 // patch) ** 2 + 1
    block = 4 * (D * D + D) + 2 * D * hidden + hidden + D + 4 * D
    return stem + (tokens + 1) * D + depth * block + 2 * D + classes * (D + 1)


@pytest.mark.parametrize(
    "name, shape, heads, millions",
    [
        ("vit_base_patch16_224", (768, 3072, 12, 16), 12, 86),
        ("vit_large_patch32_224", (1024, 4096, 24, 32), 16, 307),
        ("vit_huge_patch14_224", (1280, 5120, 32, 14), 16, 632),
    ],
)
def test_sizes_of_the_paper(name, shape, heads, millions):
    """Oracle: table 1 of the paper, in millions, and the equations; 86.6 is printed as 86, and 307 is L/32."""
    with torch.device("meta"):
        model = create_model(name, num_classes=1000)
    count = sum(p.numel() for p in model.parameters())
    assert count == parameters(*shape) and abs(count / 1e6 - millions) < 0.6
    assert {block.attn.num_heads for block in model.blocks} == {heads}


def test_half_of_all_widths():
    """Oracle: the equations, for ViT-b/32 of figure 4: half of D and of the MLP of ViT-B/32, the same depth."""
    with torch.device("meta"):
        whole, half = (create_model("vit_base_patch32_224", embed_dim=D, num_heads=D // 64) for D in (768, 384))
    assert half.blocks[0].mlp.fc1.out_features == 1536 and len(half.blocks) == len(whole.blocks) == 12
    assert sum(p.numel() for p in half.parameters()) == parameters(384, 1536, 12, 32)


@pytest.mark.parametrize(
    "name, side, old, grid", [("vit_large_patch16_224", 512, 14, 32), ("vit_huge_patch14_224", 518, 16, 37)]
)
def test_resolutions_of_fine_tuning(name, side, old, grid):
    """Oracle: H / P patches a side, of images of 512 (L/16) and 518 pixels (H/14), to which positions are resized."""
    with torch.device("meta"):
        model = create_model(name, img_size=side, depth=1)
    assert model.patch_embed.grid_size == (grid, grid) and model.pos_embed.shape[1] == 1 + grid**2
    table = torch.randn(1, 1 + old**2, 8)
    assert resize_pos_embed(table, (old, old), (grid, grid), 1, "bilinear").shape == (1, 1 + grid**2, 8)


def test_standardised_convolution():
    """Oracle: ŵ = (w − mean) / √(variance + 1e-8) over all weights of an output channel (arXiv:1903.10520, eq. 2), a
    convolution that is padded evenly, and its gradient."""
    ours = random_(StdConv2d(3, 4, 3))
    image, weight = torch.randn(2, 3, 6, 5, dtype=torch.float64), ours.weight.detach().clone().requires_grad_()
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    scaled = centred / (centred.square().mean((1, 2, 3), keepdim=True) + 1e-8).sqrt()
    found, want = ours(image), F.conv2d(image, scaled, padding=1)
    weights = torch.randn_like(want)
    assert same(found, want)
    (found * weights).sum().backward()
    assert same(ours.weight.grad, torch.autograd.grad((want * weights).sum(), weight)[0])


def test_pre_training_head_has_a_tanh_layer_and_fine_tuning_replaces_both():
    """tanh(W y + b) then linear; fine-tuning puts one zero-initialised D x K layer in place of both."""
    model, image = vit(pre_logits=True), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = model.forward_features(image)[:, 0]
    hidden = torch.tanh(y @ model.pre_logits.fc.weight.T + model.pre_logits.fc.bias)
    assert same(model(image), hidden @ model.head.weight.T + model.head.bias)
    model.reset_classifier(7)
    assert len(model.pre_logits) == 0 and torch.equal(model(image), torch.zeros(2, 7, dtype=torch.float64))
    base, head = (create_model("vit_base_patch16_224", depth=1, pre_logits=p) for p in (False, True))
    assert sum(p.numel() for p in head.parameters()) - sum(p.numel() for p in base.parameters()) == 768**2 + 768


def test_hybrid_takes_the_feature_map_as_sequence():
    """R50 at stride 16 gives a 14x14x1024 map at 224 pixels, cut into 1x1 patches: 196 tokens and the class token."""
    with torch.device("meta"):
        model = create_model("vit_base_r50_s16_224", depth=1)
        assert model.patch_embed.backbone(torch.empty(1, 3, 224, 224)).shape == (1, 1024, 14, 14)
        assert model.patch_embed.proj.weight.shape == (768, 1024, 1, 1)
        assert model.forward_features(torch.empty(1, 3, 224, 224)).shape == (1, 197, 768)


def test_higher_resolution_keeps_the_patch_and_lengthens_the_sequence():
    """224 → 384 at P = 16: 196 → 576 tokens; positions interpolated by PyTorch, and identity at the same size."""
    model = create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True).eval()
    old, new = model.pos_embed, model.positions((24, 24))
    grid = old[:, 1:].unflatten(1, (14, 14)).movedim(-1, 1)
    grid = F.interpolate(grid, (24, 24), mode="bicubic", antialias=True).flatten(2).mT
    assert new.shape == (1, 577, 192) and torch.equal(new, torch.cat((old[:, :1], grid), 1))
    assert model(torch.randn(1, 3, 384, 384)).isfinite().all()
    assert model.positions((14, 14)) is model.pos_embed


# DeiT


def test_distillation_losses():
    """Equations 2 and 3 written out; the teacher gets no gradient."""
    student, distilled, teacher = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    target = torch.tensor([0, 3, 1, 4])

    def cross_entropy(logits, classes):
        return -logits.log_softmax(-1)[torch.arange(4), classes].mean()

    hard = hard_distillation(student, distilled, teacher, target)
    assert same(hard, cross_entropy(student, target) / 2 + cross_entropy(distilled, teacher.argmax(-1)) / 2)
    p, q = (teacher / 3).softmax(-1), (distilled / 3).softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    soft = soft_distillation(student, distilled, teacher, target)
    assert same(soft, 0.9 * cross_entropy(student, target) + 0.1 * 9 * kl)
    official = soft_distillation(student, distilled, teacher, target, 0.5, 1.0, "official")
    assert same(
        official,
        0.5 * cross_entropy(student, target)
        + 0.5 * (teacher.softmax(-1) * (teacher.log_softmax(-1) - distilled.log_softmax(-1))).sum() / 20,
    )
    (hard + soft).backward()
    assert teacher.grad is None
    (only,) = torch.autograd.grad(F.cross_entropy(distilled, teacher.argmax(-1)), distilled)
    half = hard_distillation(student.detach(), distilled, teacher, target)
    assert same(torch.autograd.grad(half, distilled)[0], only / 2)
    with pytest.raises(ValueError, match="reduction is 'mean'; use 'batchmean' or 'official'"):
        soft_distillation(student, distilled, teacher, target, reduction="mean")


def test_distillation_token_has_its_own_position_and_head():
    """[cls; dist; patches] + E_pos with N + 2 rows; two heads, averaged at inference."""
    model = create_model("deit_tiny_distilled_patch16_224", depth=1, img_size=32).eval()
    assert model.pos_embed.shape[1] == 2 + 4
    features = model.forward_features(torch.randn(2, 3, 32, 32))
    want = (model.head(features[:, 0]) + model.head_dist(features[:, 1])) / 2
    assert torch.equal(model.forward_head(features), want)
