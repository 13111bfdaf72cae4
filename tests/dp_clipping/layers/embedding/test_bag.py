"""Bags of ids with offsets; those of [batch, tokens] are in `tests/dp_clipping/ops`."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_close, criterion_of, gradients_of, private
from tests.support import zoo
from tests.support.turns import in_turn


class Ragged(nn.Module):
    """Bags with offsets, whose weight may be the head's too, and that may be used twice."""

    def __init__(self, mode="sum", padding=False, last=False, tied=False, twice=False):
        super().__init__()
        padding_idx = 2 if padding else None
        self.bag = nn.EmbeddingBag(
            9, 4, mode=mode, padding_idx=padding_idx, include_last_offset=last
        )
        self.head = nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.bag.weight
        self.twice = twice

    def forward(self, ids, offsets, weights=None):
        y = self.bag(ids, offsets, weights).sin()
        return self.head(y * self.bag(ids, offsets).cos() if self.twice else y)


LENGTHS = (3, 0, 2, 7, 1)  # of the bags: one is empty


def ragged_batch(
    lengths, last: bool, weighted: bool, dtype=torch.float64
) -> tuple[list[Tensor], Tensor]:
    """Arguments of bags of such lengths, and targets."""
    ids = torch.randint(9, (sum(lengths),))
    ids[:3] = 2  # a bag of one id, which may be the padding
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    args = [ids, offsets if last else offsets[:-1]]
    if weighted:
        args.append(torch.randn(len(ids), dtype=dtype))
    return args, torch.randn(len(lengths), 9, dtype=dtype)


def ragged_gradients(network: Ragged, args: list[Tensor], targets: Tensor) -> oracle.Gradients:
    """By a forward and a backward of one bag at a time."""
    network = copy.deepcopy(network)
    ids, offsets, *weights = args
    bounds = offsets.tolist() + ([] if network.bag.include_last_offset else [len(ids)])
    found: dict[str, list[Tensor]] = {name: [] for name, _ in network.named_parameters()}
    for i, target in enumerate(targets):
        own = slice(bounds[i], bounds[i + 1])
        one = torch.tensor([0, bounds[i + 1] - bounds[i]])
        one = one if network.bag.include_last_offset else one[:1]
        y = network(ids[own], one, *(w[own] for w in weights))
        gradients = torch.autograd.grad((y * target).sum(), list(network.parameters()))
        for of_parameter, g in zip(found.values(), gradients, strict=True):
            of_parameter.append(g)
    return {name: torch.stack(rows) for name, rows in found.items()}


def check_ragged(network, mode, lengths=LENGTHS, weighted=False, tolerance=1e-9):
    dtype = network.bag.weight.dtype
    args, targets = ragged_batch(lengths, network.bag.include_last_offset, weighted, dtype)
    gradients = ragged_gradients(network, args, targets)
    threshold = oracle.norms(gradients).median().item() or 1.0
    model = private(copy.deepcopy(network), mode, max_grad_norm=threshold)
    criterion_of(model, zoo.product)(model(*args), targets).backward()
    norms = model.per_sample_gradient_norms.double()
    torch.testing.assert_close(norms, oracle.norms(gradients).double(), rtol=1e-5, atol=1e-7)
    assert_close(gradients_of(model), oracle.clipped_sum(gradients, threshold), tolerance)
    return model


RAGGED = {  # options of the network, and of the check
    "sum": ({}, {}),
    "mean": ({"mode": "mean"}, {}),
    "sum, padded": ({"padding": True}, {}),
    "mean, padded, last": ({"mode": "mean", "padding": True, "last": True}, {}),
    "tied": ({"tied": True}, {}),
    "tied mean": ({"mode": "mean", "tied": True}, {}),
    "twice": ({"twice": True, "padding": True}, {}),
    "weighted": ({"padding": True}, {"weighted": True}),
    "weighted, last": ({"padding": True, "last": True}, {"weighted": True}),
    "one bag": ({"mode": "mean"}, {"lengths": (4,)}),
    "an empty one": ({"mode": "mean"}, {"lengths": (0,)}),
    "no ids": ({"mode": "mean"}, {"lengths": (0, 0, 0)}),
}


@pytest.mark.parametrize(("name", "mode"), in_turn(RAGGED, MODES))
def test_bags_with_offsets(name, mode):
    options, how = RAGGED[name]
    model = check_ragged(Ragged(**options).double(), mode, **how)
    assert "embedding_bag" in {handle.kind for handle in model.capture.handles}


@pytest.mark.parametrize("last", [False, True])
def test_an_empty_batch_of_bags_with_offsets(last):
    """It may be the first one, or come later."""
    network = Ragged(last=last).double()
    args, targets = ragged_batch(LENGTHS, last, False)
    for start in (0, 1) if last else (0,):
        model = private(copy.deepcopy(network))
        nothing = torch.zeros(0, dtype=torch.long), torch.zeros(start, dtype=torch.long)
        for given, wanted in ((nothing, targets[:0]), (args, targets), (nothing, targets[:0])):
            model.clear_gradients()
            y = model(*given)
            assert len(y) == len(wanted)
            criterion_of(model, zoo.product)(y, wanted).backward()
            assert any(g.any() for g in gradients_of(model).values()) == bool(len(wanted))


class Centred(Ragged):
    def forward(self, ids, offsets, weights=None):
        y = self.bag(ids, offsets, weights)
        return self.head(y - y.mean(0))


def test_bags_with_offsets_that_see_each_other_are_refused():
    args, _ = ragged_batch(LENGTHS, False, False)
    with pytest.raises(ValueError, match="head sees of a sample depends on the other samples"):
        private(Centred())(*args)


def test_a_last_offset_that_leaves_ids_over_is_refused():
    args, _ = ragged_batch(LENGTHS, True, False)
    args[1][-1] -= 1
    with pytest.raises(ValueError, match="its last offset is 12 for 13 ids"):
        private(Ragged(last=True))(*args)


class Counting(TorchFunctionMode):
    """Counts reads of numbers by the host."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (Tensor.__int__, Tensor.__bool__, Tensor.item, Tensor.tolist)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("last", [False, True])
def test_a_later_forward_reads_no_offset_on_the_host(last):
    args, _ = ragged_batch(LENGTHS, last, True, torch.float32)
    model = private(Ragged(last=last, padding=True))
    model(*args)
    model.skip_checks()
    with Counting() as counting:
        model(*args)
    assert counting.count == 0


def check_ragged_on_kernels() -> None:
    for mode in ("flash", "flash_bookkeeping"):
        for weighted in (False, True):
            check_ragged(Ragged(padding=True), mode, weighted=weighted, tolerance=2e-4)


def test_bags_with_offsets_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_ragged_on_kernels)
