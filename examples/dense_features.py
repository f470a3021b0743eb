"""Extracts feature maps of several layers from images, as for segmentation, detection or retrieval of regions.

    python examples/dense_features.py photo.jpg other.png
    python examples/dense_features.py photo.jpg --model swin_tiny_patch4_window7_224 --random

Writes an .npz file with one array [images, channels, height, width] for each layer, and prints their shapes. The
pretrained weights are downloaded unless --random is given. Every model of `fastvit-triton models` can be used.
"""

import argparse

import numpy as np
import torch

import fastvit_triton


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--model", default="vit_small_patch14_reg4_dinov2", help="default: %(default)s")
    parser.add_argument("--random", action="store_true", help="use random weights")
    parser.add_argument("--layers", type=int, default=4, help="number of layers, the last ones (default: %(default)s)")
    parser.add_argument("--out", default="features.npz", help="file to write (default: %(default)s)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = fastvit_triton.create_model(args.model, pretrained=not args.random).eval().to(device)
    transform = fastvit_triton.transforms(model)
    images = torch.stack([transform(path) for path in args.images]).to(device)
    with torch.no_grad():
        last, maps = model.forward_intermediates(images, indices=args.layers, norm=False)
    names = [info["module"] for info in model.feature_info[-args.layers :]]
    for name, features in zip(names, maps, strict=True):
        print(f"{name}: {list(features.shape)}")
    np.savez(args.out, **{name: features.cpu() for name, features in zip(names, maps, strict=True)})
    print(f"{args.out} holds {len(maps)} layers; the features before the pooling are {list(last.shape)}")

    # A decoder that takes a list of maps calls a module, without the layers that follow the last map:
    indices = range(len(model.feature_info) - args.layers, len(model.feature_info))
    backbone = fastvit_triton.create_model(args.model, features_only=True, out_indices=indices).eval().to(device)
    fastvit_triton.load_weights(backbone, model.state_dict())
    with torch.no_grad():
        difference = max(float((one - two).abs().max()) for one, two in zip(backbone(images), maps, strict=True))
    print(f"channels of features_only: {backbone.feature_info.channels()}, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
