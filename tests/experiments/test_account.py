"""`experiments.networks.account`: kernels by part, and the least time that each part needs."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import dp_clipping
from ddp_by_hand.experiments.networks import account, floors
from ddp_by_hand.experiments.networks.account import ALL, LESS, MORE, part_of, parts_of
from ddp_by_hand.experiments.networks.floors import (
    EMBEDDINGS,
    HALF,
    KEPT,
    LAYOUTS,
    NOISE,
    NORM_LAYERS,
    NORMS,
    SINGLE,
    SUMS,
    TF32,
    VECTORS,
    Ceilings,
    floors_of,
    measure_ceilings,
)
from ddp_by_hand.experiments.networks.rows import ROWS
from dp_clipping.planning.cost_model import ACCUMULATE, GRAM, INSTANTIATE

CPU = torch.device("cpu")
MEMORY = Ceilings({HALF: 1e30, TF32: 1e30, SINGLE: 1e30}, 1e3)  # a byte takes 1 ms
PRODUCTS = Ceilings({HALF: 1e3, TF32: 1e3, SINGLE: 1e3}, 1e30)  # an operation takes 1 ms
CHECKS = {"_signed_sums_kernel"}  # are in no step that is measured


def of(layer: nn.Module, x: torch.Tensor, ceilings: Ceilings, **algorithms: str):
    return floors_of(layer.to(x.dtype), (x,), len(x), algorithms, ceilings)[0]


def near(*floor: float):
    return pytest.approx(floor, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "norms", "sums", "kept"),
    [
        (INSTANTIATE, (72, 60 + 24), (0, 0), 24 + 24),
        (GRAM, (2 * 3 * 4 * 5, 60), (72, 60 + 24), 0),
        (ACCUMULATE, (72, 60), (72, 60 + 24), 0),
    ],
)
def test_a_linear_layer(algorithm, norms, sums, kept):
    """B = 2, T = 3, p = 2, d = 3 in 16 bit: u = 72, factors of 60 bytes, G of 24, W of 12."""
    x, layer = torch.randn(2, 3, 2, dtype=torch.bfloat16), nn.Linear(2, 3, bias=False)
    for ceilings, n in ((PRODUCTS, 0), (MEMORY, 1)):
        found = of(layer, x, ceilings, weight=algorithm)
        assert found[NORMS] == near(0, norms[n])
        assert found[SUMS] == near((72, 60 + 12)[n], sums[n])
    assert found.get(KEPT, (0, 0)) == near(0, kept)


def test_a_token_alone_and_a_bias():
    """Norms of one token are read; B = 2, p = d = 2 in float32, factors of 32 bytes."""
    found = of(nn.Linear(2, 2), torch.randn(2, 2), PRODUCTS)
    assert found[NORMS] == near(0, 0)
    found = of(nn.Linear(2, 2), torch.randn(2, 2), MEMORY)
    assert found[NORMS] == near(0, 32)
    kept = 2 * 2 * 4
    assert found[VECTORS] == near(16 + 8, 16 + kept + kept)
    assert found[KEPT] == near(0, kept + 8)
    assert found[NOISE] == near(0, 6 * (4 + 4))


def test_convolutions_keep_gradients_or_operands():
    """In float32 the kernels read 16 bit, and first look for scales."""
    x = torch.randn(2, 8, 4, 4)
    found = of(nn.Conv2d(8, 8, 1, bias=False), x, MEMORY)
    both = 2 * x.numel()
    assert found[LAYOUTS] == near(both * 8, both * (4 + 4 + 2))
    kept = 2 * 64 * 4
    assert found[NORMS] == near(0, both * 2 + kept)
    assert found[SUMS] == near(both * 4 + 64 * 4, 0)
    assert found[KEPT] == near(0, kept + 64 * 4)
    found = of(nn.Conv2d(8, 8, 3, padding=1, bias=False), x, MEMORY)
    assert found[NORMS] == near(0, both * 2)  # G has more values than x and y
    assert found[SUMS] == near(both * 4 + 576 * 4, both * 2 + 576 * 4)
    assert KEPT not in found


def test_depthwise_and_transposed_convolutions():
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16)
    found = of(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), x, MEMORY)
    both, kept = 2 * x.numel(), 2 * 72 * 4
    assert found[LAYOUTS] == near(0, both * 4)
    assert found[NORMS] == near(0, both * 2 + kept)
    assert found[VECTORS] == near(0, kept)
    found = of(nn.ConvTranspose2d(8, 8, 2, 2, bias=False), x, PRODUCTS)
    assert found[SUMS].ordinary == pytest.approx(2 * 2 * 16 * 4 * 64)  # of 16 positions


def test_norm_layers_and_embeddings():
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    found = of(nn.LayerNorm(4), x, MEMORY)
    kept = 2 * 8 * 4
    assert found[NORM_LAYERS] == near(2 * 48 + 16, 2 * 48 + kept)
    assert found[VECTORS] == near(0, kept)
    tokens = torch.tensor([[1, 2, 3], [0, 0, 1]])
    found = floors_of(nn.Embedding(5, 4).bfloat16(), (tokens,), 2, {}, MEMORY)[0]
    assert found[EMBEDDINGS] == near(48 + 40, 48 + 2 * 6 * 4 * 4 + 80)


def test_recurrent_layers_and_attention_are_products():
    """Packed sequences have the tokens of all samples, here five of two."""
    lstm = nn.LSTM(3, 4, bias=False)
    packed = pack_padded_sequence(torch.randn(3, 2, 3), torch.tensor([3, 2]))
    found = floors_of(lstm, (packed,), 2, {}, PRODUCTS)[0]
    u = 2 * 5 * (16 * 3 + 16 * 4)
    assert found[NORMS] == near(0, u)
    assert found[SUMS] == near(u, u)
    fast = Ceilings({HALF: 8e3, TF32: 4e3, SINGLE: 1e3}, 1e30)
    assert floors_of(lstm, (packed,), 2, {}, fast)[0][SUMS] == near(u / 4, u)
    with patch.object(floors, "LEAST_ROUNDED", 0):  # packed in 16 bit, like a convolution
        found = floors_of(lstm, (packed,), 2, {}, fast)[0]
        moved = floors_of(lstm, (packed,), 2, {}, MEMORY)[0][LAYOUTS]
    assert (found[NORMS], found[SUMS]) == (near(0, u / 8), near(u / 4, u / 8))
    factors = 5 * (16 + 3 + 16 + 4)
    assert moved == near(0, 2 * 4 * factors + 2 * factors)
    attention, x = nn.MultiheadAttention(4, 2, bias=False, batch_first=True), torch.randn(2, 3, 4)
    found = floors_of(attention, (x, x, x), 2, {}, PRODUCTS)[0]
    assert found[SUMS].ordinary == pytest.approx(2 * 6 * (48 + 16))


@pytest.mark.parametrize("name", ROWS)
def test_each_network_has_floors(name):
    task = ROWS[name].build(True, CPU)
    samples = len(task.targets)
    found, without = floors_of(task.network, task.inputs, samples, {}, MEMORY)
    assert found.keys() <= set(floors.PARTS)
    assert all(min(floor) >= 0 for floor in found.values())
    known = r"layer_scale|cls_token|position_embeddings|relative_attention_bias"
    assert [name for name in without if not re.search(known, name)] == []
    assert not any(layer._forward_hooks for layer in task.network.modules())


def test_ceilings_are_measured():
    before = torch.backends.cuda.matmul.fp32_precision
    found = measure_ceilings(CPU, side=32, copied=1 << 16)
    assert found.products.keys() == {HALF, TF32, SINGLE}
    assert min(found.copy, *found.products.values()) > 0
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert "TFLOP/s" in str(found)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_96x64_64x8_2x4_h_bz_NTN", SUMS),
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", None),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>()", SUMS),
        ("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_nhwckrsc_nhwc_tilesize", SUMS),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_grad_weight_kernel", SUMS),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float>", LAYOUTS),
        ("void at::native::(anonymous namespace)::compute_grad_weight<float, long>", EMBEDDINGS),
        ("void at::native::GammaBetaBackwardCUDAKernel1<float>(long)", NORM_LAYERS),
        ("void at::native::reduce_kernel<128, 4, sum_functor<float>>", VECTORS),
        ("Memset (Device)", None),
        ("_gram_kernel", NORMS),
        ("_conv_gram_kernel", NORMS),
        ("_weighted_sum_kernel", KEPT),
    ],
)
def test_what_a_kernel_is_for(kernel, part):
    assert part_of(kernel) == part


def test_each_of_our_kernels_has_a_part():
    sources = Path(dp_clipping.__file__).parent.rglob("*.py")
    found = [
        name for path in sources for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())
    ]
    assert len(found) > 15
    assert {name for name in found if part_of(name) is None} == CHECKS
    assert len(found) == len(set(found))


ORDINARY = {
    "nvjet_bz_NTN": (2.0, 4), "nvjet_bz_NNT": (5.0, 4), "add": (1.0, 1), "copy": (0.5, 1),
}  # fmt: skip
PRIVATE = {
    "_gram_kernel": (1.0, 1), "_weighted_products_kernel": (3.0, 2), "nvjet_bz_NNT": (5.0, 4),
    "add": (1.5, 1), "fill": (0.25, 2), "_add_noise_kernel": (0.2, 1),
}  # fmt: skip
FLOORS = {NORMS: (0.0, 0.5), SUMS: (1.5, 1.6), NOISE: (0.0, 0.2)}


def test_the_largest_gap_is_first_and_nothing_is_lost():
    rows = parts_of(ORDINARY, PRIVATE, FLOORS)
    parts = {row["part"]: row for row in rows}
    assert [row["part"] for row in rows] == [
        SUMS, MORE, NORMS, NOISE, LESS, ALL
    ]  # fmt: skip
    assert parts[SUMS] == pytest.approx({
        "part": SUMS, "ordinary": 2.0, "private": 3.0, "extra": 1.0, "floor": 0.1,
        "gap": 0.9, "ratio": 10.0,
    })  # fmt: skip
    assert parts[MORE]["extra"] == 0.75
    assert parts[MORE]["floor"] is None
    assert parts[LESS]["extra"] == -0.5
    assert parts[ALL]["ordinary"] == sum(ms for ms, _ in ORDINARY.values())
    assert parts[ALL]["private"] == pytest.approx(sum(ms for ms, _ in PRIVATE.values()))
    assert parts[ALL]["floor"] == pytest.approx(0.8)


@pytest.fixture
def profiled(monkeypatch):
    """A machine whose profiler finds the kernels above."""
    found = {"ordinary": ORDINARY, "flash_bookkeeping": PRIVATE}
    real = account.training_of

    def training_of(variant, *rest):
        training, batch = real(variant, *rest)
        training.variant = variant
        return training, batch

    monkeypatch.setattr(account, "training_of", training_of)
    monkeypatch.setattr(account, "kernels_of", lambda training, *_: found[training.variant])
    monkeypatch.setattr(account.of, "measure_ceilings", lambda device: MEMORY)


def test_a_run_and_its_document(profiled, tmp_path, capsys):
    output = tmp_path / "account.json"
    options = account.Options(networks=("table", "convnext_t"), small=True, output=output)
    cells = account.run_all(options, CPU)
    text = capsys.readouterr().out
    assert [cell["status"] for cell in cells] == ["ok", "ok"]
    assert "ceilings: bfloat16" in text
    assert "+0.50 ms: add" in text
    assert "2 parameters have no floor, such as " in text
    kept = json.loads(output.read_text())
    assert kept["cells"][0]["kernels"]["ordinary"]["add"] == [1.0, 1]
    assert account.main(["--markdown", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "| `convnext_t` | 8.5 | 10.9 | 1.29 | 2.4 |" in shown
    assert "products: sums +1.00 (floor " in shown


def test_a_network_that_fails_has_a_line(profiled, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(account, "kernels_of", fails)
    (cell,) = account.run_all(account.Options(networks=("table",), small=True), CPU)
    assert cell["status"] == "error"
    assert "table: error: raised: RuntimeError: no such kernel" in capsys.readouterr().out


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert account.main([]) == 2
    assert "there is no GPU, whose kernels this profiles: run it on one" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("[]")
    for path in (other, tmp_path / "none.json"):
        assert account.main(["--markdown", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert_base", "resnet18"])
def test_on_a_gpu(name):
    (cell,) = account.run_all(account.Options(networks=(name,), small=True), torch.device("cuda"))
    assert cell["status"] == "ok", cell
    ours = [kernel for kernel in cell["kernels"]["flash_bookkeeping"] if kernel.startswith("_")]
    assert any(part_of(kernel) == NOISE for kernel in ours)
