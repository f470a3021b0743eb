"""Packaging. Each dependency is here for one reason, given beside it."""

from pathlib import Path

from setuptools import find_packages, setup

DEMO = [
    "scikit-learn>=1.4",  # the handwritten digits, which ship inside it, and the stratified split
    "matplotlib>=3.8",  # curves.png, predictions.png, the figures of explain
]
JSONSCHEMA = "jsonschema>=4.20"  # checks the files that users contribute
SHARDS = [
    "webdataset>=1.0",  # writes shards; reading them needs nothing
]
DOCS = [
    "mkdocs-material>=9.5",  # the site of docs/
    "mkdocstrings[python]>=1.0",  # its API page
]
TEST = [
    *DEMO,
    *SHARDS,
    "pytest>=8",
    "pytest-benchmark>=4",
    "pytest-xdist>=3.8",  # workers; from 3.8 on tests/conftest.py may order the files
    "timm==1.0.31",  # oracle: plain ViT families
    "torchvision",  # oracle: vit_b_16; timm imports it
    "transformers>=5",  # oracle: ViT, DeiT, DINOv2, SigLIP, CLIP
    "vit-pytorch",  # oracle: SimpleViT
    "einops",  # the survey's snippets use it
    "onnxscript",  # torch.onnx.export
    "onnxruntime; python_version >= '3.11'",  # oracle: runs what was exported
    "ruff",
    "mypy",  # .ci/run
    JSONSCHEMA,
    "nbclient>=0.10",  # executes the notebook
    "nbformat>=5.10",  # reads it
    "ipykernel>=6.29",  # runs it
]

setup(
    name="fastvit_triton",
    version="0.1.0",
    description="Vision Transformers on fused Triton kernels that plug into torch.nn",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["fastvit_triton", "fastvit_triton.*"]),
    package_data={"fastvit_triton": ["py.typed", "*.pyi", "kernels/tuned/*.json"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",  # the kernels; without it every op takes the PyTorch path
        "numpy",  # JAX checkpoints (.npz)
        "safetensors>=0.4",  # checkpoints
        "pillow>=10",  # image files
        "rich>=13",  # progress bars and tables
        "platformdirs>=4",  # where this GPU's measurements are kept
        "filelock>=3",  # one process at a time writes them
    ],
    extras_require={
        "demo": DEMO,
        "shards": SHARDS,
        "docs": DOCS,
        "test": TEST,
        "bench": ["pytest-benchmark>=4", "timm==1.0.31", "matplotlib>=3.8", JSONSCHEMA],
    },
    entry_points={
        "console_scripts": ["fastvit-triton = fastvit_triton.cli:main"],
        "torch_dynamo_backends": ["fastvit_triton = fastvit_triton.convert.backend:backend"],
    },
)
