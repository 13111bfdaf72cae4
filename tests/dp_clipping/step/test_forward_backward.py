"""Each forward opens a private step for one backward; a pass that fails leaves none."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from dp_clipping.criterion import PrivateCriterion
from dp_clipping.losses.private_loss import PrivateLoss
from dp_clipping.sampling.usage import Ticket
from dp_clipping.step.forward_backward import ForwardBackward
from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.torch_compat import hooks_of
from tests.dp_clipping.conftest import assert_exact, assert_step, private, private_loss
from tests.dp_clipping.guard.test_lengths import CLASSES, REFUSED, WORDS, in_autocast, train
from tests.support import zoo


@pytest.fixture
def model():
    return private(zoo.linear(3, 2), "bookkeeping")


def test_precision_is_as_before_where_sums_are_not_taken(model, monkeypatch):
    """Whoever holds the error holds the generator that forms them."""

    def taken(buffer, sums):
        next(iter(sums))
        raise ArithmeticError

    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    monkeypatch.setattr(GradientBuffer, "accumulate", taken)
    try:
        with pytest.raises(ArithmeticError) as held:
            private_loss(model, (torch.ones(4, 3), torch.ones(4, 2)), zoo.product).backward()
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32", held
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("name", ["transformer", "relative_positions"])
def test_steps_and_models_are_freed(name, mode):
    """Also those whose losses were looked at, and forwards without a backward."""
    case = zoo.BY_NAME[name]
    network = case.build()
    model, batch = private(network, mode), case.batch(4)
    context, reference = weakref.ref(model.step_context), weakref.ref(network)

    def steps() -> int:
        gc.collect()
        every = [x for x in gc.get_objects() if type(x) is PrivateStep]
        return sum(x.context is context() for x in every)

    for _ in range(4):
        private_loss(model, batch, case.per_sample_loss)
        private_loss(model, batch, case.per_sample_loss).backward()
        model.clear_gradients()
        assert steps() == 0
    del model, network
    gc.collect()
    assert reference() is None


def test_a_forward_that_fails_opens_none(model):
    def fail(*_):
        raise ArithmeticError

    for _ in range(2):  # the second batch is the last one that is looked at
        model(torch.ones(4, 3))
    before = model.step_state.pending
    hook = model.network.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(5, 3))
    hook.remove()
    assert model.step_state.pending in (None, before)
    private_loss(model, (torch.ones(5, 3), torch.ones(5, 2)), zoo.product).backward()


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, *args, **kwargs):
        (packed,) = (*args, *kwargs.values())
        return self.lstm(packed[0]["x"] if isinstance(packed, list) else packed)[1][0][0]


class Packs(LastState):
    """Packs and pads within the model, as the message of the refusal shows."""

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return super().forward(packed)


def packed_rows(is_sorted: bool) -> rnn.PackedSequence:
    torch.manual_seed(0)
    lengths = [4, 2, 2, 1] if is_sorted else [2, 4, 1, 2]
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    return rnn.pack_sequence(rows, enforce_sorted=is_sorted)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
def test_a_packed_sequence_is_an_argument(place, is_sorted, batch_first):
    packed = packed_rows(is_sorted)
    args = {"positional": (packed,), "keyword": (), "nested": ([{"x": packed}],)}[place]
    kwargs = {"input": packed} if place == "keyword" else {}
    x, lengths = rnn.pad_packed_sequence(packed, batch_first=True)
    network, inside = LastState().double(), Packs().double()
    inside.load_state_dict(network.state_dict())
    weights = torch.randn(4, 2, dtype=torch.float64)
    assert_exact(inside, ({"x": x, "lengths": lengths}, weights))
    models = [private(network, batch_first=batch_first), private(inside)]
    for model, given in zip(models, [(args, kwargs), ((x, lengths), {})], strict=True):
        for _ in range(3):  # checks of later batches differ
            model.zero_grad()
            losses = zoo.product(model(*given[0], **given[1]), weights)
            PrivateLoss(model, model.step_state.pending, losses, "sum").backward()
    norms = [model.per_sample_gradient_norms for model in models]
    torch.testing.assert_close(norms[0], norms[1])
    for one, other in zip(network.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not hooks_of(network)


def rarely(net, x):
    """Computes the same by other operators where the batch has a 20."""
    is_rare = bool((x == 20).any())
    return net.layer((x[:, None] * net.scale)[:, 0] if is_rare else x * net.scale)


def test_operators_that_no_search_sees_run_under_vmap():
    """In a batch that is not checked, and at a sample that a second search does not look at."""
    torch.manual_seed(0)
    scale, layer = nn.Parameter(torch.randn(5)), nn.Linear(5, 2)
    network = zoo.Net(rarely, scale=scale, layer=layer).double()
    model, found = private(copy.deepcopy(network)), []
    for batch in range(3):
        x = torch.randn(6, 5, dtype=torch.float64)
        x[5, 0] = 20 if batch == 2 else 0
        assert_step(model, network, (x, torch.randn(6, 2)))
        found.append([h.operations is None for h in model.capture.handles if not h.name])
    assert found == [[False], [False], [True]]


def test_what_a_backward_changes_is_looked_at():
    """With the packed sequences of the forward."""
    network = LastState().double()
    network.seen = None
    network.register_buffer("count", torch.zeros(()))
    model = private(network)

    def step(hook):
        outputs = model(packed_rows(False))
        outputs.register_hook(hook)
        losses = zoo.product(outputs, torch.ones(4, 2))
        PrivateLoss(model, model.step_state.pending, losses, "sum").backward()

    step(lambda gradient: setattr(network, "seen", gradient.detach()))
    assert network.seen.shape == (4, 2)
    with pytest.raises(ValueError, match="a backward changes count: a parameter or a buffer"):
        step(lambda gradient: network.count.add_(1) and None)


def test_lengths_are_compared_in_the_autocast_of_the_forward():
    """The network reads the last position, and runs in autocast alone."""
    network = zoo.Net(
        lambda net, ids: net.head(net.words(ids).bfloat16())[:, -1],
        words=nn.Embedding(WORDS, 6), head=nn.Linear(6, CLASSES),
    )  # fmt: skip
    with pytest.raises(ValueError, match=REFUSED):
        train(network, loop=in_autocast)


def test_a_compiled_network_refuses_packed_sequences_with_the_call_that_works():
    network = LastState()
    network.head = nn.Linear(2, 2)
    network.head.compile(backend="eager")
    with pytest.raises(ValueError, match=r"is given a PackedSequence.*pack_padded_sequence\(x"):
        private(network)(packed_rows(True))


def test_bags_with_offsets_have_no_rows_of_zeros():
    model = private(nn.EmbeddingBag(9, 2, mode="sum"))
    model.step_state.usage.ticket = Ticket(3, rows=4)
    with pytest.raises(ValueError, match=r"pad_batches=True adds a row.*leave it out"):
        model(torch.arange(4), torch.tensor([0, 1, 2, 3]))


class Calls(nn.Module):
    """A linear layer of 5 features, behind what a user's code does with the arguments."""

    def __init__(self, do=lambda x: x):
        super().__init__()
        self.layer, self.do = nn.Linear(5, 3), do

    def forward(self, x, *others, **options):
        return self.layer(self.do(x, *others, **options))


def fails(error):
    def do(x):
        raise error

    return do


OWN = {  # a call that fails: the network's code, and the arguments
    "width": (lambda x: x, [torch.ones(6, 7)]),
    "width deep inside": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(3, 5)), []),
    "view": (lambda x: x.view(7, 5), []),
    "dtype": (lambda x: x, [torch.ones(6, 5, dtype=torch.long)]),
    "rows": (lambda x, mask: x * mask, [torch.ones(6, 5), torch.ones(4, 5)]),
    "missing": (lambda x, mask: x * mask, []),
    "no tensor": (lambda x: x, [[1.0, 2.0]]),
    "no sample": (lambda x: x, [torch.tensor(1.0)]),
    "assertion": (lambda x: fails(AssertionError(f"{len(x)} rows"))(x), []),
    "ValueError": (lambda x: fails(ValueError(f"{len(x)} rows"))(x), []),
    "KeyError": (lambda x: {}[len(x)], []),
    "attribute": (lambda x: x.missing, []),
}


@pytest.mark.parametrize(("do", "given"), OWN.values(), ids=OWN)
def test_a_call_that_fails_raises_its_own_error(do, given):
    """With the shapes of the call, not those of batches that were made from it."""
    args = given or [torch.ones(6, 5)]
    network = Calls(do)
    with pytest.raises(Exception) as own:
        network(*args)
    model = private(network, "bookkeeping")
    with pytest.raises(type(own.value)) as ours:
        model(*args)
    assert str(ours.value) == str(own.value)
    assert ours.value.__suppress_context__


def joined(x, edges, of_graph):
    """A sum over each node's neighbours, and over each graph's nodes."""
    x = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return x.new_zeros(int(of_graph.max()) + 1, 5).index_add(0, of_graph, x)


OF_ALL_ROWS = {  # a call that runs, and does not with other numbers of samples
    "view": (lambda x: x.view(6, -1), [], r"as x\.view\(len\(x\), -1\) does"),
    "assertion": (lambda x: x if len(x) == 6 else fails(AssertionError("not six\nrows"))(x), [],
                  r"\(AssertionError: not six\).*any number of"),
    "graphs": (
        joined, [torch.tensor([[0, 1, 3, 5], [1, 0, 4, 5]]), torch.tensor([0, 0, 1, 1, 2, 2])],
        r"IndexError.*joined into one; pad them .*adjacency \[batch, nodes, nodes\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("do", "others", "message"), OF_ALL_ROWS.values(), ids=OF_ALL_ROWS)
def test_a_call_that_needs_all_of_its_rows_is_refused_in_words(do, others, message):
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    Calls(do)(x, *others)
    network = Calls(do)
    network.spare = nn.Linear(2, 2)  # which no forward uses
    with pytest.raises(ValueError, match="runs on its batch, and not on some.*" + message):
        private(network, "bookkeeping")(x, *others)


BOXES = [{"boxes": torch.rand(n, 5), "kinds": torch.zeros(n).long()} for n in (1, 2, 3, 4, 7, 4)]
LISTED = {  # what the network computes, and its arguments: a list has an entry for each sample
    "images": (lambda images: torch.stack(images), ([torch.ones(5)] * 6,)),
    "in a dict": (lambda x, boxes: x + torch.stack([b["boxes"].mean(0) for b in boxes]),
                  (torch.ones(6, 5), BOXES)),
}  # fmt: skip


@pytest.mark.parametrize(("do", "args"), LISTED.values(), ids=LISTED)
def test_a_list_of_samples_is_refused_in_words(do, args):
    Calls(do)(*args)
    model = private(Calls(do), "bookkeeping")
    model.step_state.usage.hand_over(Ticket(samples=6))
    with pytest.raises(
        ValueError, match=r"a list with an entry for each of 6 .*torch\.stack\(images"
    ):
        model(*args)


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 6])
def test_a_list_of_targets_for_the_criterion(samples):
    """Also where one of them has as many rows as there are samples."""
    model = private(Calls(), "bookkeeping")

    def of_boxes(y, boxes):
        return torch.stack(
            [(a - b["boxes"][:, :3]).square().mean() for a, b in zip(y, boxes, strict=True)]
        )

    x, boxes = torch.randn(samples, 5), BOXES[:samples]
    criterion = PrivateCriterion(model, of_boxes, "mean")
    criterion(model(x), boxes).backward()
    plain, norms = zoo.seeded(Calls), []
    plain.load_state_dict(model.network.state_dict())
    for i in range(samples):
        plain.zero_grad()
        of_boxes(plain(x[i : i + 1]), boxes[i : i + 1]).sum().backward()
        norms.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).norm())
    torch.testing.assert_close(model.per_sample_gradient_norms, torch.stack(norms))


def test_graphs_that_are_padded_train():
    def padded(x, adjacency):
        return (x + adjacency @ x).sum(1)

    torch.manual_seed(0)
    model = private(Calls(padded), "bookkeeping")
    batch = torch.randn(4, 3, 5), (torch.rand(4, 3, 3) > 0.5).float()
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    criterion(model(*batch), torch.zeros(4, dtype=torch.long)).backward()
    assert model.per_sample_gradient_norms.shape == (4,)


def test_an_interrupted_search_is_recovered_from(monkeypatch):
    recovered = []
    monkeypatch.setattr(ForwardBackward, "recover", lambda self: recovered.append(self))
    model = private(Calls(lambda x: x if len(x) == 6 else fails(KeyboardInterrupt())(x)))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(6, 5))
    assert recovered == [model.passes]


@pytest.mark.parametrize("is_first", [False, True])
def test_an_empty_batch_that_fails_names_the_row_of_zeros(is_first):
    model = private(Calls(lambda x: x if x.any() else fails(ValueError("zeros"))(x)), "bookkeeping")
    torch.manual_seed(0)
    if not is_first:
        model(torch.randn(4, 5))
    with pytest.raises(ValueError, match=r"no sample.*row of zeros .*ValueError: zeros"):
        model(torch.zeros(0, 5))
