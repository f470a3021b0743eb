"""Draws the overview of a model from its module tree: the modules of one call, with parameters and shapes of outputs.

    python examples/draw_model.py
    python examples/draw_model.py --model swin_tiny_patch4_window7_224 --out swin.png

One box for equal blocks; beside it are the modules of a block. Hooks note the order of modules with parameters.
"""

import argparse
from functools import partial

import torch
from matplotlib.figure import Figure

import fastvit_triton


def note(boxes: list[tuple[str, str]], name: str, part: torch.nn.Module, _: tuple, y: torch.Tensor) -> None:
    """Adds a module's name, and what is written in its box."""
    if count := sum(p.numel() for p in part.parameters()):
        boxes.append((name, f"{type(part).__name__}, {count:,} parameters → {list(y.shape)}"))


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224", help="default: %(default)s")
    parser.add_argument("--out", default="model.png", help="file to write (default: %(default)s)")
    args = parser.parse_args()

    model = fastvit_triton.create_model(args.model, num_classes=1000).eval()
    modules, size = dict(model.named_modules()), fastvit_triton.data_config(model)["input_size"]
    blocks = [name for name, part in modules.items() if hasattr(part, "attn") and name.rpartition(".")[2].isdecimal()]
    ends = [name for name, _ in model.named_children() if not any(block.startswith(name) for block in blocks)]
    inside = [f"{blocks[0]}.{name}" for name, _ in modules[blocks[0]].named_children()]
    whole, block = [("image", str([1, *size]))], []
    for boxes, names in ((whole, dict.fromkeys((*ends, *model.head_names, *blocks))), (block, inside)):
        for name in names:
            modules[name].register_forward_hook(partial(note, boxes, name))
    with torch.no_grad():
        whole.append(("logits", str(list(model(torch.zeros(1, *size)).shape))))
    left: dict[str, str] = {}  # what is written → name; of equal blocks, also the last
    for name, text in whole:
        left[text] = f"{left[text].partition(' … ')[0]} … {name}" if text in left else name

    columns = (args.model, [(name, text) for text, name in left.items()]), (f"a block of {len(blocks)}", block)
    page = Figure(figsize=(10, 1 + 0.75 * (height := max(len(left), len(block)))), layout="constrained")
    axes = page.subplots(subplot_kw=dict(xlim=(0, 2), ylim=(-1.2, height), xticks=(), yticks=(), frame_on=False))
    style, arrow = dict(ha="center", va="center", size=9, bbox=dict(fc="#eef3fd")), dict(arrowstyle="->")
    for x, (title, column) in zip((0.5, 1.5), columns, strict=True):
        axes.text(x, -0.9, title, ha="center", weight="bold")
        for y, (name, text) in enumerate(column):
            axes.text(x, y, f"{name}\n{text}", **style)
            axes.annotate("", (x, y + 0.7), (x, y + 0.3), arrowprops=arrow | dict(alpha=y + 1 < len(column)))
            print(f"{title}, {name}: {text}")
    page.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
