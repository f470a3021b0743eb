"""Published numbers of the ViT paper (Dosovitskiy et al., arXiv:2010.11929), for redraws. None was measured here."""

SOURCE = "published: Dosovitskiy et al., arXiv:2010.11929"

# Table 5: ImageNet top-1 in % after fine-tuning, by pre-training data.
MODELS = ("B/16", "B/32", "L/16", "L/32", "H/14")
TABLE_5 = {
    "ImageNet": (77.91, 73.38, 76.53, 71.16, None),
    "ImageNet-21k": (83.97, 81.28, 85.15, 80.99, 85.13),
    "JFT-300M": (84.15, 80.73, 87.12, 84.37, 88.04),
}

# Table 6: pre-training in exaFLOPs; where a model was trained for two lengths, epochs stand behind it.
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
