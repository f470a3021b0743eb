"""Tests of whole vision-language models of transformers. Oracle: the original model, in float64 with PyTorch."""

import copy

import pytest
import torch
from budget import allowed, telling

pytest.importorskip("transformers")
import transformers
from catalogue import redraw
from catalogue.comparison import unrounded

from fastvit_triton import optimize, revert
from fastvit_triton.kernels.backend import using_backend

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
EXACT = 84 * torch.finfo(torch.float64).eps  # as in test_models.py
FEW = 8 * torch.finfo(torch.float32).eps  # a few values are rounded to float32, as in catalogue.comparison
IMAGE, START, END = 7, 5, 6  # ids of tokens
TEXT = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=16, num_attention_heads=2)
TEXT |= dict(num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
IDS = dict(image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=8)


def qwen():
    """Qwen2.5-VL: packed images, rotary positions, windows; and its inputs, two images of different sizes."""
    tower = dict(depth=2, hidden_size=24, num_heads=2, intermediate_size=40, out_hidden_size=32, patch_size=4)
    tower |= dict(fullatt_block_indexes=[1], window_size=16)
    rope = dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e4)
    config = transformers.Qwen2_5_VLConfig(vision_config=tower, text_config=TEXT | dict(rope_parameters=rope), **IDS)
    grids = torch.tensor([[1, 4, 4], [1, 2, 4]])
    ids = [2, START, *[IMAGE] * 4, END, 3, START, *[IMAGE] * 2, END, 4]
    kinds = torch.tensor([[int(i == IMAGE) for i in ids]])
    inputs = dict(pixel_values=torch.randn(24, 3 * 2 * 4 * 4, dtype=torch.float64), image_grid_thw=grids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), inputs | dict(
        input_ids=torch.tensor([ids]), mm_token_type_ids=kinds
    )


def llava():
    """LLaVA with SigLIP's tower; and its inputs, one image."""
    tower = transformers.SiglipVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    inputs = dict(pixel_values=torch.randn(1, 3, 16, 16, dtype=torch.float64))
    return transformers.LlavaForConditionalGeneration(config), inputs | dict(
        input_ids=torch.tensor([[2, *[IMAGE] * 4, 3]])
    )


VLMS = {"qwen2_5_vl": (qwen, "model.visual"), "llava": (llava, "model.vision_tower")}


@pytest.fixture(params=VLMS)
def vlm(request):
    """(original, optimised copy, inputs, path of the tower)."""
    torch.manual_seed(0)
    make, tower = VLMS[request.param]
    model, inputs = make()
    original = redraw(model).double().eval()
    return original, copy.deepcopy(original), inputs, tower


def logits(model, inputs):
    """The logits of a call that runs our references where the model was converted."""
    with using_backend("torch"):
        return model(**inputs).logits


def assert_equal(got, want, tolerance=EXACT):
    assert (got - want).norm() <= tolerance * telling(want).norm()


def is_converted(model, tower):
    """True if every attention and MLP of the tower has a fused forward."""
    names = [name for name, module in model.get_submodule(tower).named_modules() if "forward" in module.__dict__]
    return all(any(name.endswith(end) for name in names) for end in ("attn", "mlp"))


def test_the_tower_is_converted(vlm):
    """All of the tower is converted; of the language model, its MLPs and norms. `revert` restores the outputs."""
    original, model, inputs, tower = vlm
    report = optimize(model)
    assert is_converted(model, tower) and not any(row.path.startswith(tower) for row in report.left)
    text = {row.became for row in report.rows if ".language_model." in f".{row.path}." and row.became}
    assert text == {"fused MLP, swiglu", "RMSNorm kernel"}
    with unrounded():
        assert_equal(logits(model, inputs), logits(original, inputs))
    revert(model)
    assert torch.equal(logits(model, inputs), logits(original, inputs))


def test_generate(vlm):
    """Greedy decoding gives the original's tokens."""
    original, model, inputs, _ = vlm
    optimize(model)
    settings = dict(max_new_tokens=6, do_sample=False, use_cache=True)
    with using_backend("torch"):
        assert model.generate(**inputs, **settings).tolist() == original.generate(**inputs, **settings).tolist()


def test_attention_implementation_may_change_after_optimize(vlm):
    """Outputs equal those of the original with "sdpa"; the softmax of "eager" is in float32."""
    original, model, inputs, tower = vlm
    optimize(model)
    with unrounded():
        want = logits(original, inputs)
        for name in ("eager", "fastvit_triton", "sdpa"):
            model.get_submodule(tower).set_attn_implementation(name)
            assert_equal(logits(model, inputs), want, FEW if name == "eager" else EXACT)


def test_gradient_checkpointing(vlm):
    """Gradients of all parameters equal those of the original without checkpointing."""
    original, model, inputs, _ = vlm
    optimize(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    with unrounded(), using_backend("torch"):  # also of what is computed again
        for each in (original, model):
            each(**inputs).logits.square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), original.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    assert_equal(*(torch.cat([g.flatten() for g in grads if g is not None]) for grads in zip(*pairs, strict=True)))


def test_lora_on_the_language_model(vlm):
    """PEFT replaces layers of the language model: the tower stays converted, adapters get the original's gradients."""
    peft = pytest.importorskip("peft")
    original, model, inputs, tower = vlm
    settings = peft.LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights=False)
    optimize(model)
    grads = []
    for each in (original, model):
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(each, settings).double()
        with unrounded(), using_backend("torch"):
            wrapped(**inputs).logits.square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for n, p in wrapped.named_parameters() if "lora_" in n]))
    assert is_converted(wrapped.base_model.model, tower)
    assert_equal(*grads[::-1])


def test_bfloat16(vlm):
    """The converted tower is as close to float64 as the original in bfloat16, up to a factor of 2 and one rounding."""
    original, model, inputs, _ = vlm
    optimize(model)
    want = logits(original, inputs)
    narrow = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    ours, theirs = (logits(each.bfloat16(), narrow).double() for each in (model, original))
    most = allowed((theirs - want).norm(), telling(want).norm(), torch.bfloat16)
    assert (ours - want).norm() <= most


def test_device_map(vlm, tmp_path):
    """A model that accelerate dispatched, which hooks every module, gives the original's outputs after optimize."""
    pytest.importorskip("accelerate")
    original, model, inputs, _ = vlm
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.float64).eval()
    optimize(loaded)
    with unrounded():
        assert_equal(logits(loaded, inputs), logits(original, inputs))
