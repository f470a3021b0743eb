"""Fine-tunes a model of timm on fused kernels, and saves the weights under timm's keys.

    python examples/finetune_timm.py                                       # the handwritten digits of scikit-learn
    python examples/finetune_timm.py --model swin_tiny_patch4_window7_224 --data photos

`photos` holds train/<class>/ and val/<class>/. The pretrained weights are downloaded; --random starts without them.
Prints what `optimize` did and, after each epoch, what was measured. Without a GPU timm's own code runs.
"""

import argparse
from dataclasses import replace
from functools import partial

import timm
import torch

import fastvit_triton
from fastvit_triton.train import FOLDER, Step, adamw, evaluate, fit, load, warmup_cosine


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a name of timm (default: %(default)s)")
    parser.add_argument("--data", default="digits", help="folder of images (default: the digits)")
    parser.add_argument("--random", action="store_true", help="start from random weights")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="processes that decode images (default: %(default)s)")
    parser.add_argument("--out", default="finetuned.pt", help="file to write (default: %(default)s)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = timm.get_pretrained_cfg(args.model)  # how images were prepared for the pretrained weights
    recipe = replace(FOLDER, img_size=known.input_size[1], mean=known.mean, std=known.std, batch_size=args.batch_size)
    recipe = replace(recipe, interpolation=known.interpolation, policy="" if args.data == "digits" else recipe.policy)
    data = load(args.data, recipe, workers=args.workers)
    outputs = dict(num_classes=len(data.classes), in_chans=len(data.transform.mean))
    model = timm.create_model(args.model, pretrained=not args.random, **outputs).to(device)
    print(fastvit_triton.optimize(model))

    amp = torch.bfloat16 if device == "cuda" else None
    steps = args.epochs * len(data.train)
    lr_at = partial(warmup_cosine, steps=steps, warmup=steps // 20, peak=args.lr)
    test = partial(evaluate, batches=data.test, amp=amp)
    optimizer = adamw(model, args.lr, weight_decay=0.05)
    for now in fit(model, data.train, optimizer, lr_at, epochs=args.epochs, step=Step(amp=amp, clip=1.0), test=test):
        if now.done:
            speed = f"{now.images / now.seconds:.0f} images/s in training on this {device}"
            print(f"epoch {now.epoch}: loss {now.loss:.3f}, test accuracy {now.test.accuracy:.1%}, {speed}")
    fastvit_triton.revert(model)
    torch.save(model.state_dict(), args.out)
    print(f"{args.out} holds {args.model} with timm's keys, for {len(data.classes)} classes")


if __name__ == "__main__":
    main()
