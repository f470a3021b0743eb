"""Exports a model to ONNX, and classifies images with onnxruntime, prepared by the file's metadata.

    python examples/export_onnx.py photo.jpg                                          # pretrained weights, downloaded
    python examples/export_onnx.py photo.jpg --model vit_tiny_patch16_224 --random

Prints the difference from PyTorch, the best classes, and the time that was measured. The commands are
`fastvit-triton export --to onnx CHECKPOINT OUT` for a trained model; `classify` below is all that a server needs.
"""

import argparse
import json
import time

import numpy as np
import onnxruntime

import fastvit_triton


def classify(path: str, files: list[str]) -> tuple[list[str], float]:
    """(best class of each image, time of the network in ms)."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    held = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    transform = fastvit_triton.transforms(held)  # decodes, crops, resizes and normalises as in training
    images = np.stack([transform(file).numpy() for file in files])
    start = time.perf_counter()
    (logits,) = session.run(["logits"], {"images": images})
    took = 1e3 * (time.perf_counter() - start)
    return [held["classes"][i] if "classes" in held else str(i) for i in logits.argmax(1)], took


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--model", default="vit_small_patch16_224.augreg_in21k_ft_in1k", help="default: %(default)s")
    parser.add_argument("--random", action="store_true", help="use random weights")
    parser.add_argument("--out", default="model.onnx", help="file to write (default: %(default)s)")
    args = parser.parse_args()

    model = fastvit_triton.create_model(args.model, pretrained=not args.random)
    done = fastvit_triton.export_model(model, args.out, "onnx")
    print(f"{args.out}: opset {done.metadata['opset']}, largest difference from PyTorch {done.difference:.1e}")
    classes, took = classify(args.out, args.images)
    for file, name in zip(args.images, classes, strict=True):
        print(f"{file}: {name}")
    print(f"{len(classes)} images took {took:.1f} ms, measured with onnxruntime on this CPU")


if __name__ == "__main__":
    main()
