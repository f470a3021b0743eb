"""The command line: one module per command, which parses options, calls the package and prints; no other room prints.

In go words; out come lines, files and an exit status (0, 1, or 2 for a wrong option). `arguments` has the options that
commands share, `tasks` what train, predict and evaluate do with each kind of model, `loading` reads trained models.

Begin with `predict`, a short command, then `parser`, which has the list of commands.
"""

import io
import os
import sys

from .. import __version__
from . import (
    benchmark,
    check,
    convert,
    data,
    doctor,
    evaluate,
    explain,
    export,
    generate,
    models,
    pack,
    predict,
    push,
    restore,
    selftest,
    train,
    tune,
)
from .console import print_error, short_warnings
from .parser import Parser

ON_IMAGES = (train, predict, generate, restore, explain, evaluate)
COMMANDS = (*ON_IMAGES, data, models, check, benchmark, selftest, tune, doctor, convert, export, push, pack)

EXAMPLES = (
    "fastvit-triton train                                # handwritten digits",
    "fastvit-triton train --data photos --val-split 0.2  # a folder for each class",
    "fastvit-triton predict --checkpoint runs/photos a.jpg",
    "fastvit-triton check --model timm:vit_base_patch16_224",
    "fastvit-triton train --help                         # more examples",
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; without arguments, prints the list of commands."""
    # Idle threads sleep instead of spinning; on busy cores small models train up to 20 times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding lacks, as on stderr
    words = sys.argv[1:] if argv is None else argv
    try:
        with short_warnings():
            args = build_parser().parse_args(words or ["--help"])
            return args.run(args)
    except KeyboardInterrupt:
        return print_error("stopped", 130)
    except OSError as error:
        return print_error(str(error), 1)
    except ValueError as error:
        return print_error(str(error), 2)
    except RuntimeError as error:
        if "DataLoader worker" in str(error):
            text = "a worker process that decodes images died, perhaps out of memory; lower --workers"
            return print_error(text, 1)
        if "deterministic implementation" in str(error):
            return print_error(f"--deterministic: {str(error).splitlines()[0]}", 2)
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return print_error("the device is out of memory; lower the batch size or use a smaller --model", 1)


def build_parser() -> Parser:
    """The parser of all commands.

    Each module of `COMMANDS` has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(args)`.
    """
    parser = Parser(prog="fastvit-triton", description="Vision Transformers on fused Triton kernels.")
    parser.examples = EXAMPLES
    parser.add_argument("-V", "--version", action="version", version=f"fastvit-triton {__version__}")
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.run.__doc__)
        command.examples = module.EXAMPLES
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
