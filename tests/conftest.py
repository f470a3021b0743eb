"""Shared setup of all tests: file order, one thread per process, fixed seeds, and a check of restored global state.

With workers (`-n auto --dist loadfile`) a file runs in one process, and files are handed out in order, so those that
take longest come first. Workers share Triton's cache safely: its files are named by content and moved into place.
"""

import logging
import os
import re

# must be set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin, so the machine stays usable

import pytest
import torch
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (must precede timm)
from fastvit_triton.engine import ways
from fastvit_triton.kernels import backend, fold, launch, op, settings

# sorted by CPU time of the whole file, longest first
LONGEST = """backend convert parallel cli static candidates export export_files interpreter freeze replay
odd_graphs rewriting benchmarks kernel_graphs explain plan models pyramids pressure tune launches
convert_hooks fake_device recovery recipes train shards readme features masked""".split()


# For `-m fast`: file → a regular expression for the names of its fast tests; an empty one matches all. Chosen with
# `--durations=0` to take a minute on two cores; slow files contribute the quickest test of each concern.
FAST = {
    **dict.fromkeys("augment block count data equations fewshot fingerprint kernels loss mix naflex".split(), ""),
    **dict.fromkeys("community graphs house hub measured published ranges scaling schedule warm_up".split(), ""),
    **dict.fromkeys("weights weights_faults weights_positions weights_pyramids".split(), ""),
    "backend": r"equal_the_original\[timm_vit\]|linear_norm|autocast.*float16|drop_path|logged",
    "benchmarks": r"^(?!test_dry_run|test_compiled|test_cpu_benchmark)",
    "check": r"overrun|verdict|paired|reasons|only_dropout|complete|exit_code|kernels|travels|summarised|contributed",
    "cli": r"doctor_names|convert_round_trip|rejects|version|models|defaults|order_typed",
    "convert": r"references_equal|report_|original_runs|keys|replaced|draws|masks|equal_the_original\[timm_vit\]",
    "convert_hooks": r"forwards_are_called\[|failed_optimize|see_every_call\[|fx|labels",
    "explain": r"reference|gradients|rollout|published",
    "explain_pyramids": r"named|refuse|softmax\[(twins|swin|cait|levit)-reference",
    "export": r"jit",
    "export_files": r"invalid|naflex",
    "features": r"timms\[vit_tiny_p|launch|early|checkpoint|naflex|sentence",
    "freeze": r"fold-ours-_(optimizer|data_merge|assign)|fold_once|threshold|invalid|detect.*_(optimizer|assign)",
    "fuzz": r"committed|sample",
    "fake_device": r"architecture|wait",
    "interpreter": r"equals_float64\[torch.float16|frozen|bounds|outside|masks",
    "kernel_graphs": r"meta|stride|passed_on|autocast|only_the_residual|fp16|one_graph\[False\]",
    "launch": r"direct|hooks|knobs|replaced|globals|grids|64_bits|of_the_tensors|release",
    "launches": r"by_hand|counted|found",
    "masked": r"^(?!test_pre_training)",
    "models": r"parameter_count|^test_(options|activations|\w+drop|torchvision)|timms\[\w+(patch16_224|dinov2)\]",
    "packaging": "",
    "parallel": r"failed_write|torchrun_is|blocks|invalid",
    "plan": r"first_table|expected_time|rates|order|ieee|host|plain",
    "pressure": r"detected|mutation|relu|alignment",
    "pyramids": r"one_sentence|without_reduction|every_pair|frozen_block|resized",
    "readme": r"shows|recorded|\[0 ",
    "replay": r"buffers|same_arguments|guards_saved|later_changes_take_effect\[(scale|transposed)",
    "recipes": r"lamb|operations|policy|accumulated|distillation_equals|dropped|invalid",
    "recovery": r"within|old_file|divergence|non_finite|vanishes",
    "selftest": r"wrong_op|interrupt|invalid|plan_of|modes|bits|share",
    "shards": r"\[0-[123]-|windows|webdataset|invalid|another_number",
    "static": r"complete|floor|reused",
    "train": r"^(?!test_full_disk|test_plots)",
    "train_digits": r"fused",
    "tune": r"fastest$|share|processes|files",
}


def pytest_configure(config: pytest.Config) -> None:
    """Makes xdist hand out files in the order below instead of by their number of tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # runs before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the fast tests, and moves the longest files to the front; tests within a file keep their order."""
    found = {item: item.path.stem.removeprefix("test_") for item in items if item.path.parent.name == "tests"}
    for item, file in found.items():
        if file in FAST and re.search(FAST[file], item.name):
            item.add_marker(pytest.mark.fast)
    marked = {file for item, file in found.items() if item.get_closest_marker("fast")}
    for file in FAST.keys() & set(found.values()) - marked:
        if not any("::" in word for word in config.args):
            raise pytest.UsageError(f"tests/conftest.py: FAST[{file!r}] matches no test of test_{file}.py")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(found.get(item), len(places)))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds every test, so that it draws the same random numbers alone and in the suite."""
    torch.manual_seed(0)


def state() -> dict[str, object]:
    """All global state that a test may change and must restore."""
    hooks = torch.nn.modules.module
    held = {name: dict(getattr(hooks, name)) for name in dir(hooks) if name.startswith("_global_") and "hooks" in name}
    return dict(
        switch=backend._switch,
        target=launch.target,
        plan=(settings.forced, settings.assumed, settings.observer, settings.locator, ways.state.inside_plain),
        registered=dict(op.REGISTERED),
        launch=(launch.run, JITFunction.run),
        call=torch.nn.Module.__call__,
        matmul=torch.Tensor.__matmul__,
        default_dtype=torch.get_default_dtype(),
        ieee=launch.is_ieee(torch.float32),
        hooks=held,
    )


@pytest.fixture(autouse=True)
def restored():
    """Checks that a test restores the global state."""
    before = state()
    yield
    assert state() == before


class Raise(logging.Handler):
    """Raises what is logged to it."""

    def emit(self, record):
        raise AssertionError(record.getMessage())


# a graph whose rewriting fails is left to Inductor with a warning; in tests this is an error
logging.getLogger("fastvit_triton.convert.backend").addHandler(Raise(logging.WARNING))


@pytest.fixture
def switch():
    """Restores the switch after tests that call `set_backend`."""
    with backend.using_backend(None):
        yield


@pytest.fixture
def references():
    """Runs fused forwards on PyTorch, like FASTVIT_TRITON_BACKEND=torch."""
    with backend.using_backend("torch"):
        yield


@pytest.fixture
def always_folded(monkeypatch):
    """Folds LayerNorms into products for any number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
