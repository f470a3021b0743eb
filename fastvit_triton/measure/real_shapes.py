"""Shapes of real ViTs for each op, most common first; `selftest` checks them."""

REAL = {
    "attention": {
        "ViT-B": dict(B=8, H=12, Nq=197, Nk=197, D=64, Dv=64),
        "ViT-H": dict(B=4, H=16, Nq=257, Nk=257, D=80, Dv=80),
        "DINOv2-B 518": dict(B=2, H=12, Nq=1370, Nk=1370, D=64, Dv=64),
        "so400m": dict(B=2, H=16, Nq=729, Nk=729, D=72, Dv=72),
        "giant": dict(B=2, H=16, Nq=257, Nk=257, D=88, Dv=88),
        "windows": dict(B=128, H=4, Nq=49, Nk=49, D=32, Dv=32, G=64),
        "bias": dict(B=8, H=12, Nq=197, Nk=197, D=64, Dv=64, G=1),
        "padded": dict(B=8, H=12, Nq=256, Nk=256, D=64, Dv=64, short=59),
    },
    "attention_qkv": {"ViT-B": dict(B=8, H=12, N=197, D=64), "ViT-S": dict(B=8, H=6, N=197, D=64)},
    "varlen_attention": {"naflex": dict(H=12, D=64, a=197, b=577, c=49)},
    "window_attention": {
        "Swin-T": dict(B=4, H=56, W=56, heads=3, D=32, h=7, w=7, sy=3, sx=3, bias=1),
        "Swin-T padded": dict(B=4, H=50, W=38, heads=3, D=32, h=7, w=7, sy=3, sx=3, bias=1, pad=1),
        "Swin-B 384": dict(B=2, H=48, W=48, heads=8, D=32, h=12, w=12, sy=6, sx=6, bias=1),
        "SwinV2-T": dict(B=4, H=64, W=64, heads=3, D=32, h=8, w=8, sy=4, sx=4, bias=1, cosine=1),
        "SwinV2-B 384": dict(B=1, H=48, W=48, heads=8, D=32, h=24, w=24, sy=12, sx=12, bias=1, cosine=1),
        "Twins-S": dict(B=4, H=56, W=56, heads=2, D=32, h=7, w=7),
    },
    "layer_norm": {"ViT-B": dict(B=8, N=197, D=768), "ViT-H": dict(B=4, N=257, D=1280)},
    "add_layer_norm": {"ViT-B": dict(B=8, N=197, D=768), "ViT-H": dict(B=4, N=257, D=1280)},
    "rms_norm": {"Qwen2.5-VL": dict(B=1, N=4096, D=1280), "InternVL-6B": dict(B=4, N=257, D=3200)},
    "add_rms_norm": {"Qwen2.5-VL": dict(B=1, N=4096, D=1280), "InternVL-6B": dict(B=4, N=257, D=3200)},
    "fold": {"ViT-B qkv": dict(F=2304, K=768, parts=1), "ViT-B q, k, v": dict(F=768, K=768, parts=3)},
    "linear": {
        "ViT-B qkv": dict(B=8, N=197, K=768, F=2304, norm=1),
        "ViT-B proj": dict(B=8, N=197, K=768, F=768, branch=1),
        "ViT-H qkv": dict(B=4, N=257, K=1280, F=3840, norm=1),
        "head": dict(B=256, N=1, K=768, F=1000),
    },
    "mlp": {
        "ViT-B": dict(B=8, N=197, D=768, F=3072),
        "ViT-Ti": dict(B=8, N=197, D=192, F=768),
        "recompute": dict(B=4, N=197, D=768, F=3072, recompute=1),
        "DINOv2-g": dict(B=2, N=257, D=1536, F=4096, swiglu=1),
    },
    "depthwise": {
        "PVTv2-B1 stage 1": dict(B=8, H=56, W=56, C=512, K=3, gelu=1),
        "PVTv2-B1 stage 4": dict(B=8, H=7, W=7, C=2048, K=3, gelu=1),
        "SegFormer-B0 stage 1": dict(B=2, H=128, W=128, C=128, K=3, gelu=1),
        "Twins-PCPVT-S stage 1": dict(B=8, H=56, W=56, C=64, K=3, residual=1),
        "CPVT-S": dict(B=8, H=14, W=14, C=384, K=3, residual=1),
        "CvT-13 keys": dict(B=8, H=28, W=28, C=192, K=3, stride=2),
    },
    "patch_embed": {
        "ViT-B": dict(B=8, C=3, H=224, W=224, P=16, D=768, T=1, pos_prefix=1),
        "ViT-H": dict(B=4, C=3, H=224, W=224, P=14, D=1280, T=1, pos_prefix=1),
    },
}
