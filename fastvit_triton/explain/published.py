"""Published numbers of the ViT paper (Dosovitskiy et al., arXiv:2010.11929), for plots. None was measured here."""

SOURCE = "published: Dosovitskiy et al., arXiv:2010.11929"

# Table 2: accuracy in %, means over three fine-tuning runs; None where the paper reports none.
TASKS = ("ImageNet", "ReaL", "CIFAR-10", "CIFAR-100", "Pets", "Flowers", "VTAB")
TABLE_2: dict[str, tuple[float | None, ...]] = {
    "ViT-H/14, JFT": (88.55, 90.72, 99.50, 94.55, 97.56, 99.68, 77.63),
    "ViT-L/16, JFT": (87.76, 90.54, 99.42, 93.90, 97.32, 99.74, 76.28),
    "ViT-L/16, I21k": (85.30, 88.62, 99.15, 93.25, 94.67, 99.61, 72.72),
    "BiT-L": (87.54, 90.54, 99.37, 93.51, 96.62, 99.63, 76.29),
    "Noisy Student": (88.4, 90.55, None, None, None, None, None),
}

# Table 5: ImageNet top-1 in % after fine-tuning, by pre-training data.
MODELS = ("B/16", "B/32", "L/16", "L/32", "H/14")
TABLE_5: dict[str, tuple[float | None, ...]] = {
    "ImageNet": (77.91, 73.38, 76.53, 71.16, None),
    "ImageNet-21k": (83.97, 81.28, 85.15, 80.99, 85.13),
    "JFT-300M": (84.15, 80.73, 87.12, 84.37, 88.04),
}

# Table 6: pre-training compute in exaFLOPs; models with two training lengths are named with the number of epochs.
TABLE_6 = {
    "ViT": {"B/32": 55, "L/32": 196, "B/16": 224, "L/16, 7": 783, "L/16, 14": 1567, "H/14": 4262},
    "hybrid": {
        "R50+B/32": 106,
        "R50+L/32": 246,
        "R50+B/16": 274,
        "R50+L/16, 7": 859,
        "R50+L/16, 14": 1668,
    },
    "ResNet": {
        "R50x1": 50,
        "R101x1": 96,
        "R152x1": 141,
        "R50x2": 199,
        "R152x2, 7": 563,
        "R152x2, 14": 1126,
        "R200x3": 3306,
    },
}
