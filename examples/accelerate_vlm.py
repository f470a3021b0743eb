"""Accelerates the vision tower of Qwen2.5-VL in transformers, and compares its outputs with the original's.

    python examples/accelerate_vlm.py                                              # a small one, with random weights
    python examples/accelerate_vlm.py --model Qwen/Qwen2.5-VL-3B-Instruct          # or a folder

Prints what each module became, the largest difference of the outputs, and the measured times. Without a GPU the
original code runs.
"""

import argparse
import statistics
import time

import torch
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen

import fastvit_triton


def small() -> Qwen:
    """Qwen2.5-VL with two narrow layers in the tower and one in the language model, and random weights."""
    tower = dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=128, out_hidden_size=64)
    text = dict(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    return Qwen(Qwen2_5_VLConfig(vision_config=tower, text_config=text | dict(intermediate_size=128)))


@torch.no_grad()
def run(tower: torch.nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(the tower's tokens for the language model, median time of ten calls in ms)."""
    times = []
    for _ in range(11):  # the first call compiles
        start = time.perf_counter()
        tokens = tower(patches, grid_thw=grids).pooler_output.cpu()  # waits for the GPU
        times.append(1e3 * (time.perf_counter() - start))
    return tokens, statistics.median(times[1:])


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hub, or a folder (default: small, with random weights)")
    parser.add_argument("--side", type=int, default=448, help="of two images, in steps of 28 (default: %(default)s)")
    args = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    vlm = (Qwen.from_pretrained(args.model) if args.model else small()).to(device, dtype).eval()
    tower, sides = vlm.model.visual, [args.side // 28 * 2] * 2
    grids = torch.tensor([[1, *sides], [1, *sides]], device=device)
    patches = torch.randn(2 * sides[0] ** 2, 3 * 2 * 14 * 14, device=device, dtype=dtype)
    want, eager = run(tower, patches, grids)
    print(fastvit_triton.optimize(vlm))
    got, ours = run(tower, patches, grids)
    print(f"largest difference {(got - want).abs().max():.1e}, of outputs up to {want.abs().max():.1e}")
    print(f"the tower took {eager:.1f} ms, and after optimize {ours:.1f} ms, measured on this {device}")


if __name__ == "__main__":
    main()
