"""Serves a classifier with CUDA graphs, for requests of different numbers of images.

    python examples/serve_cuda_graphs.py --model vit_base_patch16_224
    python examples/serve_cuda_graphs.py --model vit_base_patch16_224.augreg_in21k_ft_in1k    # pretrained

Frozen weights are folded once, and each batch size up to a quarter above a request's runs as one graph. Prints the
latencies that were measured. Without a GPU the model is called directly.
"""

import argparse
import time

import torch

import fastvit_triton


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="vit_base_patch16_224", help="of `fastvit-triton models` (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--largest", type=int, default=8, help="images in the largest request (default: %(default)s)")
    args = parser.parse_args()

    model = fastvit_triton.create_model(args.model, pretrained="." in args.model).eval()
    fastvit_triton.freeze(model)
    device, serve, dtype = "cpu", torch.no_grad()(model), torch.float32
    shape = fastvit_triton.data_config(model)["input_size"]
    if torch.cuda.is_available():
        device, dtype = "cuda", torch.bfloat16
        model = model.to(device, dtype)
        example = torch.randn(1, *shape, device=device, dtype=dtype)
        serve = fastvit_triton.cuda_graph(
            model, example, batch_sizes=range(1, args.largest + 1), max_graphs=args.largest
        )

    times = []
    for count in torch.randint(1, args.largest + 1, (args.requests,)).tolist():
        images = torch.randn(count, *shape)  # your images, prepared by fastvit_triton.transforms(model)
        start = time.perf_counter()
        classes = serve(images.to(device, dtype)).argmax(1).tolist()  # waits for the GPU
        times.append(1e3 * (time.perf_counter() - start))
        assert len(classes) == count
    times.sort()
    middle, late = times[len(times) // 2], times[int(0.99 * len(times))]
    way = "with CUDA graphs" if device == "cuda" else "without CUDA graphs"
    print(f"{args.requests} requests of 1 to {args.largest} images on this {device}, {way}:")
    print(f"median {middle:.2f} ms, 99th percentile {late:.2f} ms, measured with the copy to the device")


if __name__ == "__main__":
    main()
