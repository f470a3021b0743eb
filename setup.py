"""Packaging. A comment beside each dependency gives its one reason."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = (ROOT / "fastvit_triton/__init__.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)  # the one place; an import would need torch
MATPLOTLIB = "matplotlib>=3.8"  # curves.png, predictions.png, the figures of explain
TRAIN = [MATPLOTLIB]
DEMO = [
    *TRAIN,
    "scikit-learn>=1.4",  # the handwritten digits, which ship inside it, and the stratified split
]
JSONSCHEMA = "jsonschema>=4.20"  # checks the files that users contribute
DETECT = [
    "scipy>=1.10",  # assigns predictions to objects
    "pycocotools>=2.0.8",  # average precision
    "pyyaml>=6",  # data.yaml of YOLO
]
SHARDS = [
    "webdataset>=1.0",  # writes shards; reading them needs nothing
]
HUB = [
    "huggingface_hub>=0.34",  # pretrained weights: downloads, cache, tokens
]
PARQUET = [
    "pyarrow>=15",  # evaluate and predict --out FILE.parquet
]
DATASETS = [
    "datasets>=4",  # train --data hf:NAME
]
EXPORT = [
    "onnxscript",  # torch.onnx.export
    "onnxruntime; python_version >= '3.11'",  # compares what was exported with PyTorch
]
OPENVINO = [
    "openvino>=2025.2",  # export --to openvino, and check on a CPU
    "onnxscript",  # the ONNX program that it reads
]
TIMM = ["timm>=1.0"]
DOCS = [
    "zensical>=0.0.70; python_version >= '3.11'",  # the site of docs/
    "mkdocstrings[python]>=1.0",  # its pages of the API
]
TEST = [
    *DEMO,
    *DETECT,
    *SHARDS,
    *HUB,
    *PARQUET,
    *EXPORT,
    *OPENVINO,
    "pytest>=8",
    "pytest-benchmark>=4",
    "pytest-xdist>=3.8",  # parallel workers; tests/conftest.py may order the files from version 3.8 on
    "timm==1.0.31",  # oracle: plain ViT families
    "torchvision",  # oracle: vit_b_16; timm imports it
    "transformers>=5",  # oracle: ViT, DeiT, DINOv2, SigLIP, CLIP
    "open_clip_torch",  # oracle: CLIP's towers in their authors' layout
    "vit-pytorch",  # oracle: SimpleViT
    "accelerate",  # dispatches models by device_map
    "pytorch-lightning",  # trains a model that its callback optimises
    "peft",  # adapts language models whose vision tower is converted
    "einops",  # the survey's snippets use it
    "ruff",
    "mypy",  # .ci/run
    JSONSCHEMA,
    "nbclient>=0.10",  # executes the notebook
    "nbformat>=5.10",  # reads it
    "ipykernel>=6.29",  # runs it
]

setup(
    name="fastvit_triton",
    version=VERSION,
    description="Vision Transformers on fused Triton kernels that plug into torch.nn",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The fastvit_triton contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="vision transformer, ViT, Triton, GPU kernels, flash attention, PyTorch, torch.compile, timm",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        *[f"Programming Language :: Python :: {version}" for version in ("3", "3.10", "3.11", "3.12", "3.13")],
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["fastvit_triton", "fastvit_triton.*"]),
    package_data={
        "fastvit_triton": [
            "py.typed",
            "*.pyi",
            "kernels/tuned/*.json",
            "kernels/tuned/choices/*.json",
            "kernels/tuned/defaults/*.json",
            "convert/*.json",
            "expected/*.json",
            "models/weights/*.json",
            "models/weights/*.txt",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",  # the kernels; without it every op takes the PyTorch path
        "numpy",  # JAX checkpoints (.npz)
        "safetensors>=0.4",  # checkpoints
        "pillow>=10",  # image files
        "rich>=13",  # progress bars and tables
        "platformdirs>=4",  # where this GPU's measurements are kept
        "filelock>=4",  # one process at a time writes them
    ],
    extras_require={
        "train": TRAIN,  # of a folder of images, and explain
        "demo": DEMO,  # train without --data
        "detect": DETECT,  # training of detectors
        "shards": SHARDS,
        "hub": HUB,
        "datasets": DATASETS,
        "parquet": PARQUET,
        "tensorboard": ["tensorboard>=2.16"],  # train --log-to, this and the next three
        "wandb": ["wandb>=0.19"],
        "trackio": ["trackio>=0.3"],
        "mlflow": ["mlflow>=3"],
        "export": EXPORT,
        "all": [
            *DEMO,
            *DETECT,
            *SHARDS,
            *HUB,
            *DATASETS,
            *PARQUET,
            *EXPORT,
            *OPENVINO,
            *TIMM,
        ],  # trackers have services of their own
        "openvino": OPENVINO,
        "timm": TIMM,
        "docs": DOCS,
        "test": TEST,
        "bench": [*TIMM, "pytest-benchmark>=4", MATPLOTLIB, JSONSCHEMA],
    },
    entry_points={
        "console_scripts": ["fastvit-triton = fastvit_triton.cli:main"],
        "torch_dynamo_backends": ["fastvit_triton = fastvit_triton.convert.backend:backend"],
    },
)
