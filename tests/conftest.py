"""What all tests share: the order of files, one thread a process, the same random numbers, and a check of what is left.

With workers (`-n auto --dist loadfile`) a file runs in one process, and files are handed out in order, so those that
take longest come first. Workers share Triton's cache: its files are named by content and moved into place whole.
"""

import os
import re

# before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin: a busy machine stays usable

import pytest
import torch
from triton.runtime.jit import JITFunction

import benchmarks  # noqa: F401  (before timm)
from fastvit_triton.kernels import backend, fold, launch, op, plan
from fastvit_triton.layers import ways

# by processor time of the whole file
LONGEST = """backend convert parallel cli static candidates export interpreter freeze replay benchmarks kernel_graphs
explain plan models pressure tune launches convert_hooks fake_device recovery recipes train shards readme
masked""".split()


# For `-m fast`: file → a regular expression that the names of its fast tests match; an empty one matches all. Chosen by
# `--durations=0`, to take a minute on two cores: files that take longer contribute the quickest proof of each concern.
FAST = {
    **dict.fromkeys("augment block count data equations fewshot fingerprint kernels loss mix naflex".split(), ""),
    **dict.fromkeys("community graphs house measured published ranges scaling schedule warm_up weights".split(), ""),
    "backend": r"equal_the_original\[timm_vit\]|linear_norm|autocast.*float16|drop_path|logged",
    "benchmarks": r"^(?!test_dry_run|test_compiled|test_processors|test_plots)",
    "cli": r"doctor_names|doctor_and_bad|convert_there|rejects|version|models|defaults|order_typed",
    "convert": r"references_equal|report_|original_runs|keys|replaced|draws|masks|equal_the_original\[timm_vit\]",
    "convert_hooks": r"forwards_are_called\[|failed_optimize|see_every_call\[|fx|labels",
    "explain": r"reference|gradients|rollout|published",
    "export": r"jit",
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
    "readme": r"shows|recorded|\[0 ",
    "replay": r"buffers|passed_the_same|guards_what|later_is_seen\[(scale|transposed)",
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
    """Files are handed out as ordered below, and not by their numbers of tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the fast tests, and puts the longest files first; tests of a file keep their order."""
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
    """Every test draws the same numbers, alone or in the suite."""
    torch.manual_seed(0)


def state() -> dict[str, object]:
    """Everything global that a test may change and must put back."""
    hooks = torch.nn.modules.module
    held = {name: dict(getattr(hooks, name)) for name in dir(hooks) if name.startswith("_global_") and "hooks" in name}
    return dict(
        switch=backend._switch,
        target=launch.target,
        plan=(plan.forced, plan.assumed, plan._observer, ways.state.inside_plain),
        registered=dict(op.REGISTERED),
        launch=(launch.run, JITFunction.run),
        call=torch.nn.Module.__call__,
        matmul=torch.Tensor.__matmul__,
        default_dtype=torch.get_default_dtype(),
        precision=torch.get_float32_matmul_precision(),
        hooks=held,
    )


@pytest.fixture(autouse=True)
def restored():
    """A test leaves the switch, hooks of every module, and Triton's launcher as it found them."""
    before = state()
    yield
    assert state() == before


@pytest.fixture
def switch():
    """For tests that call `set_backend`: restores the switch."""
    with backend.using_backend(None):
        yield


@pytest.fixture
def references():
    """Fused forwards run on PyTorch, as FASTVIT_TRITON_BACKEND=torch asks."""
    with backend.using_backend("torch"):
        yield


@pytest.fixture
def always_folded(monkeypatch):
    """LayerNorms are folded into products whatever the number of rows, so that small cases take that path."""
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
