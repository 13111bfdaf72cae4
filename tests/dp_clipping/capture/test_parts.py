"""Layers that are called on parts of a batch: with all samples in turn, or with some of them."""

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.lm.parallel import TENSOR
from ddp_by_hand.lm.rank_pool import Context
from tests.dp_clipping.conftest import (
    assert_exact,
    assert_step,
    private,
    private_loss,
)
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.ranks import fsdp2


class InParts(nn.Module):
    """Computes a few samples after others, as to save memory; with masks of the same parts."""

    def __init__(self, part: int, is_attention: bool, mixes: bool = False):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)
        if not is_attention:
            self.layer = nn.Linear(4, 4)
        self.part, self.mixes = part, mixes

    def forward(self, x, mask):
        found = []
        for rows, hidden in zip(x.split(self.part), mask.split(self.part), strict=True):
            y = rows
            if isinstance(self.layer, nn.Linear):
                y = self.layer(rows)
            else:
                y = self.layer(y, y, y, key_padding_mask=hidden, need_weights=False)[0]
            found.append((y * ~hidden[..., None]).tanh() - self.mixes * y.mean(0))
        return torch.cat(found)


def samples_and_masks(count: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(count, 3, 4, dtype=torch.float64),
        "mask": torch.arange(3) > torch.arange(count)[:, None] % 3,
    }


@pytest.mark.parametrize("part", [1, 2, 3, 5])
@pytest.mark.parametrize("is_attention", [True, False])
def test_a_network_that_computes_a_few_samples_after_others(part, is_attention):
    batch = samples_and_masks(7), torch.randn(7, 3, 4, dtype=torch.float64)
    assert_exact(InParts(part, is_attention).double(), batch)


def test_a_recurrent_layer_lists_its_own_weights_when_parts_have_run():
    """PyTorch would move its parameters on a GPU, which checks take for a change of them."""
    layer = nn.LSTM(4, 4, batch_first=True)
    network = zoo.Net(lambda net, x: torch.cat([net.layer(p)[0] for p in x.split(2)]), layer=layer)
    batch = [torch.randn(5, 3, 4, dtype=torch.float64) for _ in range(2)]
    private_loss(private(network.double()), batch, zoo.product).backward()
    names = [name for name, _ in layer.named_parameters()]
    own = [getattr(layer, name) for name in names]
    assert all(map(operator.is_, layer._flat_weights, own))
    assert not layer._weights_have_changed()


def test_parts_that_begin_with_a_larger_batch_of_which_no_check_is_due():
    network = InParts(7, is_attention=True).double()
    model, targets = private(copy.deepcopy(network)), torch.randn(11, 3, 4, dtype=torch.float64)
    for count in (6, 6, 6, 6, 6, 11):
        assert_step(model, network, (samples_and_masks(count), targets[:count]))


PARTS = {
    "chunk": lambda net, x: [net.layer(part) for part in x.chunk(2)],
    "halves": lambda net, x: [net.layer(x[: len(x) // 2]), net.layer(x[len(x) // 2 :])],
    "flattened": lambda net, x: [
        net.layer(part.flatten(0, 1)).unflatten(0, (-1, 3)) for part in x.split(4)
    ],
    "flattened, time major": lambda net, x: [
        net.layer(part.transpose(0, 1).flatten(0, 1)).unflatten(0, (3, -1)).transpose(0, 1)
        for part in x.split(4)
    ],
}


class OwnLinear(nn.Module):
    """Has parameters of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x.tanh() @ self.weight


def in_parts(name: str, kind: type[nn.Module] = nn.Linear) -> nn.Module:
    layer = kind(4, 2)
    return zoo.Net(lambda net, x: torch.cat(PARTS[name](net, x)), layer=layer).double()


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_other_kinds(name):
    batch = tuple(torch.randn(7, 3, n, dtype=torch.float64) for n in (4, 2))
    assert_exact(in_parts(name), batch)


@pytest.mark.parametrize("mode", ["per_sample", "bookkeeping"])
@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear])
def test_flattened_parts_of_a_larger_batch_of_which_no_check_is_due(kind, mode):
    """Sees them where their rows could be those of all samples: 12 of 4, in a batch of 6."""
    network = in_parts("flattened", kind)
    model = private(copy.deepcopy(network), mode)
    x, targets = (torch.randn(6, 3, n, dtype=torch.float64) for n in (4, 2))
    for count in (4, 4, 4, 4, 4, 6):
        assert_step(model, network, (x[:count], targets[:count]))


class Switched(nn.Module):
    """Computes parts of the batch, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(4, 2), 99

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(self.part)])


def test_a_search_begins_anew():
    """Runs the caller under vmap from the first parts on, until the next search."""
    model, batch = private(network := Switched()), zoo.numbers(7, 4, out=(2,))

    def kind_after(part: int, *, resets: bool = True) -> str:
        network.part = part
        if resets:
            model.reset_batch_layouts()
        private_loss(model, batch, zoo.product).backward()
        model.zero_grad()
        return model.capture.handles[0].kind

    for _ in range(2):
        assert kind_after(99) == kind_after(99, resets=False) == "linear"
        assert kind_after(99, resets=False) == "linear"
        assert kind_after(5, resets=False) == kind_after(99, resets=False) == "vectorized"
        assert kind_after(99) == "linear"
        assert kind_after(5) == kind_after(5, resets=False) == kind_after(5) == "vectorized"


@pytest.mark.parametrize("kind", ["fsdp2", "tensor"])
@on_ranks(2)
def test_parts_on_ranks_are_refused_with_what_to_do(context: Context, kind: str) -> None:
    """Refuses them in a step and in a search; with all samples at once the layer runs."""
    batch, few = (zoo.numbers(count, 4, out=(2,)) for count in (7, 3))
    network, model = on_ranks_of(context, kind)
    for network.part in (5, 99):  # of the three samples both are one part
        private_loss(model, few, zoo.product).backward()
        model.zero_grad()
    network.part = 5
    with pytest.raises(
        ValueError, match=r"\(5, 4\).*: call it with all samples .* at once, as sel"
    ):
        private_loss(model, batch, zoo.product)
    network, model = on_ranks_of(context, kind)  # with torch below 2.13 one has failed for good
    private_loss(model, batch, zoo.product).backward()
    model.zero_grad()
    network.part = 1
    model.reset_batch_layouts()
    with pytest.raises(ValueError, match="samples of the batch at once, and mask"):
        private_loss(model, batch, zoo.product)


def on_ranks_of(context: Context, kind: str) -> tuple[Any, Any]:
    """Returns a `Switched` that ranks share, and its private model."""
    network = Switched()
    if kind == "fsdp2":
        network = fsdp2(context, network, "leaf")
    else:
        mesh = DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=(TENSOR,))
        parallelize_module(network.layer, mesh, ColwiseParallel(output_layouts=Replicate()))
    return network, private(network)


@pytest.mark.parametrize("part", [6, 20])
def test_samples_that_see_others_of_their_part_are_refused(part):
    batch = samples_and_masks(7), torch.ones(7, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="depends on the other samples of the batch"):
        private_loss(private(InParts(part, False, mixes=True).double()), batch, zoo.product)


def test_a_layer_that_gets_the_first_samples_alone_is_refused():
    """Refuses the first samples alone: under vmap each sample would be a first one."""

    def forward(net, x):
        y = net.first(x)
        return torch.cat((y[:3] + net.layer(y[:3]), y[3:]))

    network = zoo.Net(forward, first=nn.Linear(4, 4), layer=nn.Linear(4, 4)).double()
    batch = [torch.randn(7, 4, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(ValueError, match="depends on the other samples of the batch"):
        private_loss(private(network), batch, zoo.product)


@pytest.mark.parametrize("larger", [(6, 12), pytest.param((4, 24), marks=pytest.mark.slow)])
def test_flattened_parts_in_compiled_code(larger: tuple[int, int]) -> None:
    """Sees parts that no batch before had, of more samples or of more tokens."""

    def split(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = [net.layer(part) for part in x.flatten(0, 1).split(48)]
        return torch.cat(parts).unflatten(0, x.shape[:2])

    network = zoo.Net(split, layer=nn.Linear(4, 2)).double()
    plain = copy.deepcopy(network)
    network.compile(backend="eager")
    model = private(network)
    for shape in (*[(4, 12)] * 5, larger):
        batch = torch.randn(*shape, 4).double(), torch.randn(*shape, 2).double()
        assert_step(model, plain, batch)


class Rounds(nn.Module):
    """Layers in a loop that runs as long as the longest sample, on all samples or a few of them."""

    def __init__(self, layers: int, part: int = 99, is_flattened: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.part, self.is_flattened = part, is_flattened

    def forward(self, x: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
        for n in range(int(rounds.max())):
            for layer in self.layers:
                rows = [part.flatten(0, 1) if self.is_flattened else part
                        for part in x.split(self.part)]  # fmt: skip
                y = torch.cat([layer(row) for row in rows]).view_as(x).tanh()
                x = torch.where((rounds > n)[:, None, None], y, x)
        return x


def rounds_of(*rounds: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    x, targets = (torch.randn(len(rounds), 3, 4, dtype=torch.float64) for _ in range(2))
    return {"x": x, "rounds": torch.tensor(rounds)}, targets


@pytest.mark.parametrize("is_flattened", [True, False])
def test_all_layers_of_a_loop_that_becomes_longer(is_flattened: bool) -> None:
    network = Rounds(3, is_flattened=is_flattened).double()
    model = private(copy.deepcopy(network))
    for rounds in (*[(1, 1, 1, 1)] * 4, (1, 1, 1, 1, 1, 2), (2, 1, 3)):
        assert_step(model, network, rounds_of(*rounds))


def test_parts_in_fewer_rounds_than_before_are_noticed():
    """Notices two parts of six samples, which are as many calls as two rounds of four samples."""
    model = private(Rounds(1, part=4, is_flattened=True).double())
    for rounds in (1, 1, 1, 1, 2):
        private_loss(model, rounds_of(*[rounds] * 4), zoo.product).backward()
        model.zero_grad()
    for _ in range(2):
        with pytest.raises(ValueError, match="depends on the other samples of the batch"):
            private_loss(model, rounds_of(*[1] * 6), zoo.product)


class Flattening(nn.Module):
    """Blocks that flatten samples and tokens, computed again in backward or not."""

    def __init__(self, blocks: int, is_computed_again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            zoo.Net(lambda net, x: net.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
                    layer=nn.Linear(4, 4)) for _ in range(blocks)
        )  # fmt: skip
        self.is_computed_again = is_computed_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.is_computed_again
                     else block(x)).tanh()  # fmt: skip
        return x


@pytest.mark.parametrize("is_whole", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_computed_again", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_blocks_share_code_in_which_flattened_samples_are_counted(
    is_whole: bool, is_computed_again: bool
) -> None:
    """Compiles once for one batch and once more for others, within torch's limit of eight."""
    torch.compiler.reset()
    counters.clear()
    network = Flattening(3 if is_whole else 10, is_computed_again).double()
    plain = copy.deepcopy(network)
    for part in [network] if is_whole else network.blocks:
        part.compile(backend="eager")
    model = private(network)
    for size in (3, 4, 5):
        batch = tuple(torch.randn(size, 5, 4, dtype=torch.float64) for _ in range(2))
        assert_step(model, plain, batch)
    assert 2 <= counters["stats"]["unique_graphs"] <= 4
    assert counters["frames"]["ok"] == counters["frames"]["total"]


def test_a_call_without_gradients_is_no_part():
    """The network's estimate is one of its inputs in some batches, as in self-conditioning."""

    class Estimating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.estimates = nn.Linear(4, 4), False

        def of_tokens(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.estimates:
                return self.of_tokens(x)
            with torch.no_grad():
                estimate = self.of_tokens(x)
            return self.of_tokens(x + estimate)

    network = Estimating().double()
    plain = copy.deepcopy(network)
    model = private(network)
    batch = tuple(torch.randn(3, 5, 4, dtype=torch.float64) for _ in range(2))
    for estimates in (False, False, False, False, True, False):
        network.estimates = plain.estimates = estimates
        assert_step(model, plain, batch)


@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("checked", [True, False])
def test_a_loop_that_becomes_longer(kind, checked):
    """Searches again where flattened samples come more often than before, in a check or not."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.times = kind(4, 4), 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = x + self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return x

    network = Repeated().double()
    plain = copy.deepcopy(network)
    model = private(network)
    for size, times in ((3, 1), (3, 2), (4, 1), (4, 4), (5, 6)):
        network.times = plain.times = times
        batch = tuple(torch.randn(size, 5, 4, dtype=torch.float64) for _ in range(2))
        assert_step(model, plain, batch)
        if not checked:
            model.skip_checks()
