"""Named models that timm has under the same names, and how many parameters the others have, with 1000 classes."""

from fastvit_triton.models import CATALOGUE, family_of
from fastvit_triton.models.vit import BASE, LARGE, Options
from fastvit_triton.models.weights.pretrained import pretrained_cfg

# timm's NaFlexVit has other names of parameters
TIMM_NAMES = [name for name in CATALOGUE if pretrained_cfg(name) and not name.startswith("naflex")]


def _setr(size: Options, side: int, kernel: int, convs: int, auxiliary: int) -> int:
    """ViT, final norm, decoder, and auxiliary decoders with a norm each."""
    D = size["embed_dim"]
    blocks = size["depth"] * (12 * D * D + 13 * D)
    encoder = 3 * 16 * 16 * D + D + ((side // 16) ** 2 + 1) * D + D + blocks + 2 * D
    first = 256 * kernel**2 * D + 3 * 256  # with its BatchNorm
    last = 1000 * 257
    more = (convs - 1) * (256 * kernel**2 * 256 + 3 * 256)
    return encoder + first + more + last + auxiliary * (2 * D + first + last)


# Image Transformer: embedding, tables of positions, blocks of projections, MLP and norms, and head.
CATEGORICAL = 768 * 512 + 12 * (4 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512) + 512 * 256 + 256
MIXTURE = 4 * 256 + 64 * 256 + 12 * (4 * 256 * 512 + 2 * 256 * 512 + 512 + 256 + 4 * 256) + 256 * 100
# IPT: the authors' x2 and six tasks (24 are fixed), and the convolution of a step of 2 in their tails.
X2 = 115_460_443
STEP = 64 * 256 * 9 + 256

PARAMETERS = {
    # ViT's without class token and positions
    "simplevit_tiny_patch16_224": 5_717_416 - 198 * 192,
    "simplevit_small_patch16_224": 22_050_664 - 198 * 384,
    # by timm's NaFlexVit, whose parameters have other names
    "naflexvit_base_patch16_gap": 86_633_704,
    "naflexvit_so150m2_patch16_reg1_gap": 136_058_728,
    # DeiT's without positions, and 10 weights per channel and generator
    "cpvt_tiny": 5_717_416 - 197 * 192 + 10 * 192,
    "cpvt_small": 22_050_664 - 197 * 384 + 10 * 384,
    "cpvt_base": 86_567_656 - 197 * 768 + 10 * 768,
    "cpvt_small_gap": 22_050_664 - 198 * 384 + 10 * 384,
    "cpvt_tiny_5peg": 5_717_416 - 197 * 192 + 50 * 192,
    "botnet50": 20_852_008,  # by timm
    "vt_resnet18": 11_807_272,  # by the equations in the tests; the paper says 11.7 M
    "attention_conv": 12_483_834,  # 12.1 M with 10 classes, as in the paper
    # by transformers 5.23, with biases and without classes
    "igpt_small": 76_682_240,
    "igpt_medium": 455_489_536,
    "igpt_large": 1_362_914_304,
    "igpt_digits": 26 * 96 + 196 * 96 + 4 * (12 * 96 * 96 + 9 * 96 + 2 * 96) + 96 + 16 * 96,
    "image_transformer_cifar10": CATEGORICAL,
    "image_transformer_cifar10_dmol": MIXTURE,
    "image_transformer_cifar10_2d": CATEGORICAL,
    "ipt_x2": X2,
    "ipt_x3": X2 - STEP + 64 * 576 * 9 + 576,
    "ipt_x4": X2 + STEP,
    "ipt_multitask": 118_892_394,
    **dict.fromkeys(("ipt_denoise30", "ipt_denoise50", "ipt_derain"), X2 - STEP),
    # by transformers 5.23, with 91 classes, and 909 more; it has one class head with `_refine`, the authors six
    "detr_resnet50": 41_524_768 + 909 * 257,
    "deformable_detr_resnet50": 40_069_665 + 909 * 257,
    "deformable_detr_resnet50_single_scale": 34_066_593 + 909 * 257,
    "deformable_detr_resnet50_refine": 40_732_725 + 5 * 91 * 257 + 6 * 909 * 257,
    "deformable_detr_resnet50_two_stage": 41_181_529 + 7 * 909 * 257,
    # convolutions, projection, layers of the encoder and of the decoder, norm, classes and "no object", boxes, queries
    "detr_digits": 60_400 + 4_160 + 2 * 49_984 + 2 * 66_752 + 128 + 1001 * 65 + 8_580 + 512,
    # convolutions, projections, layers of the encoder and of the decoder, embedding of levels, reference points, two
    # heads of classes and of boxes, queries
    "deformable_detr_digits": 60_400 + 41_344 + 2 * 47_904 + 2 * 64_672 + 128 + 130 + 2000 * 65 + 2 * 8_580 + 8 * 128,
    # stem and stages, projections, a layer of the encoder, two of the decoder, embedding of levels, proposals, and
    # three heads of classes and of boxes
    "deformable_detr_tiny": 2_384
    + 4_672
    + 14_528
    + 57_728
    + 230_144
    + 22_368
    + 63_144
    + 2 * 107_568
    + 288
    + 46_944
    + 3 * (97_000 + 19_012),
    "setr_naive_base_768": _setr(BASE, 768, 1, 1, 3),
    "setr_naive_large_768": _setr(LARGE, 768, 1, 1, 3),
    "setr_pup_large_768": _setr(LARGE, 768, 3, 4, 4),
    "setr_naive_large_512": _setr(LARGE, 512, 1, 1, 3),
    "setr_pup_large_512": _setr(LARGE, 512, 3, 4, 4),
}

# First names of families, in the order of their variants: by the authors' code, of CvT by transformers; those of
# T2T-ViT with positions and random features, which are not trained.
BY_FAMILY = {
    "pvt_tiny": (13_229_288, 24_485_864, 44_208_104, 61_369_320),
    "deepvit_16b": (24_426_664, 36_261_448, 48_096_232, 27_312_632, 58_883_708, 59_043_308),
    "lvvit_tiny": (8_534_720, 26_151_824, 55_830_544, 150_021_968),
    "refiner_vit_small": (25_408_656, 55_450_932, 81_150_192),
    "t2t_vit_7": (
        *(4_310_222, 5_889_230, 6_941_902, 21_545_550, 39_177_422, 64_105_934, 21_541_070),
        *(39_177_422 - 4_480, 64_105_934 - 4_480, 21_545_550, 25_156_302),
    ),
    "ceit_tiny_224": (6_356_904, 24_204_840, 94_405_416, 6_429_864),
    "cvt_13_224": (19_997_480, 31_622_696, 19_997_480, 31_622_696, 277_196_392),
}
for first, counts in BY_FAMILY.items():
    PARAMETERS |= zip(family_of(first).VARIANTS, counts, strict=False)

# CCT by the authors' code with their number of classes; a class has D + 1 weights.
COMPACT = (
    *(283_723, 482_123, 3_233_803, 3_326_923, 3_760_139, 3_853_259, 4_573_735, 22_367_273, 22_513_193),
    *(214_539, 412_939, 3_190_283, 3_716_619, 214_666, 413_066, 3_190_538, 3_716_874),
)
for (name, options), count in zip(family_of("cct_2_3x2_32").VARIANTS.items(), COMPACT, strict=True):
    PARAMETERS[name] = count + (1000 - options["num_classes"]) * (options["embed_dim"] + 1)
