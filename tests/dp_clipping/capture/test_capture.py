"""What captured layers do around the arithmetic: what they cost, and what they meet in real use."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    clipped_sums,
    count_calls,
    gradients_of,
    private,
    private_loss,
)
from tests.support import zoo
from tests.support.backwards import with_backward

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

ROUNDING = 4e-5  # of float32, and the margin that coefficients keep for it

every_mode = pytest.mark.parametrize("mode", MODES)
compiles = pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler


def tokens_case(length: int = 6) -> tuple[nn.Module, oracle.Batch]:
    """Linear layers 5 -> 7 -> 3 on four samples."""
    return zoo.BY_NAME["tokens"].build(), zoo.numbers(4, length, 5, out=(length, 3))


def expected_sums(
    network: nn.Module, batch: oracle.Batch, limit: float, loss: oracle.PerSampleLoss = zoo.product
) -> dict[str, Tensor]:
    return oracle.clipped_sum(oracle.per_sample_gradients(network, batch, loss), limit)


def assert_step_is_right(model, network, batch, limit=1.0, loss=zoo.product):
    assert_close(
        clipped_sums(model, batch, loss), expected_sums(network, batch, limit, loss), ROUNDING
    )


# What is computed


class Products(TorchDispatchMode):
    """Remembers the output's shape of every matrix product."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv")

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__.strip("_") in self.NAMES:
            self.shapes.append(tuple(result.shape))
        return result

    def count(self, *shape: int) -> int:
        """Of this shape or its transpose."""
        turned = (*shape[:-2], shape[-1], shape[-2])
        return sum(s in (shape, turned) for s in self.shapes)


def products_of(network: nn.Module, batch: oracle.Batch, mode: str) -> Products:
    model = private(network, mode)
    clipped_sums(model, batch)  # where the samples are is found in the first one
    with Products() as products:
        clipped_sums(model, batch)
    return products


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
def test_products_where_factors_are_kept(mode):
    """One of the parameter's shape: the weighted sum. An ordinary weight gradient would be two."""
    net = zoo.seeded(lambda: zoo.mlp(17, 19, 23)).to(torch.bfloat16)
    batch = oracle.move(zoo.numbers(4, 2, 17, out=(2, 23)), dtype=torch.bfloat16)
    products = products_of(net, batch, mode)
    assert products.count(19, 17) == 1
    assert products.count(23, 19) == 1
    assert products.count(4, 19, 17) == products.count(4, 23, 19) == 0
    forward = products.count(8, 23)
    assert forward == 1
    passes = 2 if mode == "ghost" else 1
    assert products.count(8, 17) == 0  # nobody wants the gradient of the data
    assert products.count(8, 19) == 1 + passes  # forward, and the input gradient of the head


@pytest.mark.parametrize(
    ("mode", "tokens", "times"),
    [("bookkeeping", 2, 2), ("ghost", 2, 2), ("bookkeeping", 12, 1), ("per_sample", 12, 1)],
)
def test_products_in_float32(mode, tokens, times):
    """Counts products. With factors kept, gradients of a few samples at a time are formed twice, to
    be normed and to be summed; otherwise once, and kept."""
    net = zoo.seeded(lambda: zoo.mlp(17, 19, 23))
    products = products_of(net, zoo.numbers(4, tokens, 17, out=(tokens, 23)), mode)
    assert products.count(4, 19, 17) == products.count(4, 23, 19) == times
    assert products.count(19, 17) == products.count(23, 19) == 0
    assert products.count(1, 19, 17) == products.count(1, 23, 19) == 0
    if times == 1:
        assert products.count(48, 23) == 1
        assert products.count(48, 19) == 2


def test_a_frozen_layer_costs_its_forward_and_its_input_gradient():
    net = nn.Sequential(nn.Linear(17, 19), nn.Linear(19, 23), nn.Linear(23, 29))
    net[1].requires_grad_(False)
    products = products_of(net, zoo.numbers(4, 12, 17, out=(12, 29)), "bookkeeping")
    assert products.count(23, 19) == products.count(4, 23, 19) == 0
    assert net[1].weight.grad is net[1].bias.grad is None
    assert not hasattr(net[1], "_private")


def test_nothing_below_the_lowest_trainable_layer_goes_backward():
    net = nn.Sequential(nn.Linear(17, 19), nn.Tanh(), nn.Linear(19, 23))
    net[0].requires_grad_(False)
    products = products_of(net, zoo.numbers(4, 12, 17, out=(12, 23)), "bookkeeping")
    assert products.count(48, 19) == 1


@pytest.mark.parametrize(("mode", "passes"), [("per_sample", 1), ("bookkeeping", 1), ("ghost", 2)])
def test_number_of_backwards(mode, passes):
    counted = count_calls(lambda gradient: None)
    net = zoo.two_linears(lambda net, x: net.b(with_backward(net.a(x), counted)))
    model = private(net, mode)
    batch = zoo.numbers(4, 6, 5, out=(6, 3))
    for _ in range(2):  # batches 1, 2 and 4 are checked: see `independence`
        clipped_sums(model, batch)
    counted.count = 0
    clipped_sums(model, batch)
    assert counted.count == passes


@every_mode
def test_gradients_hold_no_graph(mode):
    net, batch = tokens_case(2)
    sums = clipped_sums(private(net, mode), batch)
    assert not any(g.requires_grad for g in sums.values())
    assert not any(p.grad.requires_grad for p in net.parameters())


# torch.compile


class Blocks(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.word = nn.Embedding(zoo.VOCABULARY, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(kind(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, zoo.VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def compile_blocks(net: Blocks, **options) -> None:
    for block in net.blocks:
        block.compile(**options)


def assert_compiled_is_eager(mode: str, build, compile_it, **options) -> None:
    torch.compiler.reset()
    eager, compiled = zoo.seeded(build), zoo.seeded(build)
    before, after = private(eager, mode, 0.5), private(compiled, mode, 0.5)
    compile_it(compiled, **options)
    for batch_size in (3, 4):
        batch = zoo.tokens(batch_size)
        expected = clipped_sums(before, batch, zoo.cross_entropy)
        assert_close(clipped_sums(after, batch, zoo.cross_entropy), expected, 1e-5)
        torch.testing.assert_close(
            after.per_sample_gradient_norms, before.per_sample_gradient_norms
        )
    torch.compiler.reset()


@compiles
def test_steps_of_one_shape_compile_once():
    """Block by block; whole networks are compiled in tests/dp_clipping/contract."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    net = zoo.seeded(Blocks)
    model = private(net)
    compile_blocks(net, backend=counter)
    assert_step_is_right(model, zoo.seeded(Blocks), zoo.tokens(4), loss=zoo.cross_entropy)
    first = counter.frame_count
    for _ in range(3):
        clipped_sums(model, zoo.tokens(4), zoo.cross_entropy)
    assert counter.frame_count == first
    torch.compiler.reset()


@compiles
@pytest.mark.slow
@every_mode
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_by_inductor(mode, kind, whole):
    def compile_it(net, **options):
        if whole:
            net.compile(**options)
        else:
            compile_blocks(net, **options)

    assert_compiled_is_eager(mode, lambda: Blocks(kind), compile_it, fullgraph=True)


# Activation checkpointing


def checkpointed(dropout: float) -> nn.Module:
    def function(net, x):
        x = checkpoint(net.middle, net.first(x), use_reentrant=False)
        return net.last(x)

    return zoo.seeded(
        lambda: zoo.Net(
            function,
            first=nn.Linear(5, 6),
            middle=nn.Sequential(
                nn.LayerNorm(6), nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 6)
            ),
            last=nn.Linear(6, 3),
        )
    )


@every_mode
def test_checkpointing_repeats_dropout(mode):
    batch = zoo.numbers(4, 6, 5, out=(6, 3))
    found = []
    for net in (checkpointed(0.5), checkpointed(0.5)):
        if found:
            net.function = lambda net, x: net.last(net.middle(net.first(x)))
        torch.manual_seed(3)
        found.append(clipped_sums(private(net, mode), batch))
    assert_close(found[0], found[1], 1e-6)


# What happens between a forward and its backward


@every_mode
def test_evaluation_in_between(mode):
    net, batch = tokens_case()
    plain = copy.deepcopy(net)
    model = private(net, mode)
    loss = private_loss(model, batch, zoo.product)
    with torch.no_grad():
        torch.testing.assert_close(model(batch[0][:1]), plain(batch[0][:1]))
    model.eval()
    torch.testing.assert_close(model(batch[0][:3]), plain(batch[0][:3]))
    assert float(private_loss(model, batch, zoo.product)) != 0
    model.train()
    loss.backward()
    assert_close(gradients_of(model), expected_sums(plain, batch, 1.0), ROUNDING)


class Failure:
    """Of a hook in backward, so many calls from now; None: of none."""

    left: int | None = None

    @staticmethod
    def hook(gradient):
        if Failure.left is not None:
            Failure.left -= 1
            if Failure.left == 0:
                raise FloatingPointError("on purpose")


def failing():
    def function(net, x):
        hidden = net.a(x)
        if hidden.requires_grad:
            hidden.register_hook(Failure.hook)
        return net.b(torch.tanh(hidden))

    return zoo.seeded(lambda: zoo.two_linears(function))


@pytest.mark.parametrize(
    ("mode", "at"), [("per_sample", 1), ("bookkeeping", 1), ("ghost", 1), ("ghost", 2)]
)
def test_a_failed_backward_does_not_poison_the_next_step(mode, at, monkeypatch):
    """In the first pass, or in the second where there is one."""
    net, plain = failing(), failing()
    model = private(net, mode)
    batch = zoo.numbers(4, 2, 5, out=(2, 3))
    for _ in range(2):  # in these samples that see each other are looked for
        clipped_sums(model, batch)
    monkeypatch.setattr(Failure, "left", at)
    with pytest.raises(FloatingPointError, match="on purpose"):
        clipped_sums(model, batch)
    assert_step_is_right(model, plain, batch)


def test_a_second_attempt_counts_no_sample_twice(monkeypatch):
    """The second pass has summed one layer when it fails; nobody calls zero_grad in between."""
    net, plain = failing(), failing()
    model = private(net, "ghost")
    batch = zoo.numbers(4, 2, 5, out=(2, 3))
    for _ in range(2):
        clipped_sums(model, batch)
        model.clear_gradients()
    monkeypatch.setattr(Failure, "left", 2)
    with pytest.raises(FloatingPointError, match="on purpose"):
        private_loss(model, batch, zoo.product).backward()
    private_loss(model, batch, zoo.product).backward()
    assert_close(gradients_of(model), expected_sums(plain, batch, 1.0), ROUNDING)
    assert len(model.per_sample_gradient_norms) == 4


@every_mode
def test_a_discarded_forward(mode):
    net, batch = tokens_case()
    plain = copy.deepcopy(net)
    model = private(net, mode)
    model(batch[0][:3])
    private_loss(model, oracle.pick(batch, slice(2)), zoo.product)
    assert_step_is_right(model, plain, batch)


@every_mode
def test_two_forwards_before_a_backward(mode):
    net, batch = tokens_case()
    model = private(net, mode)
    first = private_loss(model, batch, zoo.product)
    second = private_loss(model, batch, zoo.product)
    with pytest.raises(RuntimeError, match="losses of two forwards were added"):
        (first + second).backward()
    with pytest.raises(RuntimeError, match="earlier forward"):
        first.backward()


@every_mode
@pytest.mark.parametrize("length", [2, 6])
def test_outputs_of_two_forwards_in_one_loss(mode, length):
    """Also of an earlier forward alone, where the criterion cannot know."""
    net, (inputs, targets) = tokens_case(length)
    model = private(net, mode)
    criterion_of = lambda outputs: private_loss_of(model, outputs, targets)  # noqa: E731
    for combine in (lambda a, b: a * b, lambda a, b: a):
        outputs = combine(model(inputs), model(inputs.flip(1)))
        with pytest.raises(RuntimeError, match="several forwards"):
            criterion_of(outputs).backward()
        model.clear_gradients()
    assert_step_is_right(model, copy.deepcopy(tokens_case(length)[0]), (inputs, targets))


def private_loss_of(model, outputs: Tensor, targets: Tensor):
    return PrivateCriterion(model, zoo.Criterion(zoo.product, "sum"), "sum")(outputs, targets)


# Uses that the first batch did not have


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.times = nn.Linear(5, 5), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


@every_mode
def test_a_module_used_more_often_than_in_the_first_batch(mode):
    net = zoo.seeded(Repeats)
    batch = zoo.numbers(4, 2, 5, out=(2, 5))
    model = private(net, mode)
    assert_step_is_right(model, copy.deepcopy(zoo.seeded(Repeats)), batch)
    net.times = 2
    plain = zoo.seeded(Repeats)
    plain.times = 2
    assert_step_is_right(model, plain, batch)
    net.times = plain.times = 1
    assert_step_is_right(model, plain, batch)


@every_mode
def test_inputs_of_other_dimensions_than_in_the_first_batch(mode):
    net, _ = tokens_case()
    model = private(net, mode)
    for shape in ((6, 5), (5,), (2, 3, 5), (6, 5)):
        batch = zoo.numbers(4, *shape, out=(*shape[:-1], 3))
        assert_step_is_right(model, tokens_case()[0], batch)


@every_mode
def test_a_parameter_used_outside_its_module_only(mode):
    """After the first batch its use is an error: what captures it was settled there."""

    def function(net, x):
        return F.linear(torch.tanh(net.a(x)), net.b.weight)

    net = zoo.seeded(lambda: zoo.two_linears(function))
    batch = zoo.numbers(4, 6, 5, out=(6, 3))
    assert_step_is_right(private(net, mode), copy.deepcopy(net), batch)

    net = zoo.seeded(lambda: zoo.two_linears(lambda net, x: net.b(torch.tanh(net.a(x)))))
    model = private(net, mode)
    clipped_sums(model, batch)
    model.zero_grad()
    net.function = function
    with pytest.raises(RuntimeError, match=r"b\.weight: used outside of the module"):
        clipped_sums(model, batch)


@every_mode
def test_a_parameter_used_inside_and_outside_its_module_is_named(mode):
    def function(net, x):
        return F.linear(torch.tanh(net.layer(x)), net.layer.weight)

    net = zoo.seeded(lambda: zoo.Net(function, layer=nn.Linear(5, 5)))
    with pytest.raises(RuntimeError, match=r"layer\.weight: used outside of the module"):
        clipped_sums(private(net, mode), zoo.numbers(4, 6, 5, out=(6, 5)))


# A module among others


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Conv1d(6, 6, 3, padding=1)], ids=str)
def test_hooks_run_once(layer):
    net = nn.Sequential(copy.deepcopy(layer))
    model = private(net)
    width = 3 if isinstance(layer, nn.Linear) else 5
    batch = zoo.numbers(4, 6, 5, out=(6, width))
    for _ in range(2):  # batches 1, 2 and 4 are run more often: see `independence`
        clipped_sums(model, batch)
    before = count_calls(lambda module, args: None)
    after = count_calls(lambda module, args, output: None)
    backward = count_calls(lambda module, gx, gy: None)
    net[0].register_forward_pre_hook(before)
    net[0].register_forward_hook(after)
    net[0].register_full_backward_hook(backward)
    sums = clipped_sums(model, batch)
    assert (before.count, after.count, backward.count) == (1, 1, 1)
    assert_close(sums, expected_sums(nn.Sequential(copy.deepcopy(layer)), batch, 1.0), ROUNDING)


@every_mode
def test_hooks_that_change_what_a_layer_sees_and_gives(mode):
    def build():
        net, _ = tokens_case()
        net[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
        net[2].register_forward_hook(lambda module, args, output: output + 1)
        return net

    model = private(build(), mode)
    assert_step_is_right(model, build(), tokens_case()[1], loss=zoo.squared_error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_standard_module_again(dtype):
    net, batch = tokens_case()
    net, batch = net.to(dtype), oracle.move(batch, dtype=dtype)
    plain = copy.deepcopy(net)
    model = private(net)
    clipped_sums(model, batch)
    model.clear_gradients()
    assert model.to_standard_module() is net
    for module in net.modules():
        assert "forward" not in vars(module)
        assert "_private" not in vars(module)
    for one in (net, plain):
        zoo.product(one(batch[0]), batch[1]).sum().backward()
    for mine, own in zip(net.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == own.grad.dtype
        torch.testing.assert_close(mine.grad, own.grad)


def test_private_twice():
    """After `to_standard_module` another mode takes over."""
    net, batch = tokens_case()
    for mode in MODES:
        model = private(net, mode)
        assert_step_is_right(model, tokens_case()[0], batch)
        model.clear_gradients()
        model.to_standard_module()


# Parameters that are made of others


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("case", zoo.parameters("lora_lm"))
def test_lora_leaves_the_base_alone(case):
    model = private(case.build())
    clipped_sums(model, case.batch(4), case.per_sample_loss)
    gradients = {name for name, p in model.network.named_parameters() if p.grad is not None}
    assert gradients == {n for n, p in model.network.named_parameters() if "lora_" in n}


@every_mode
def test_a_layer_that_is_used_without_gradients_first_is_trained(mode):
    def function(net, x):
        with torch.no_grad():
            before = net.first(x)
        return net.second(before + net.first(x))

    def build():
        return zoo.Net(function, first=nn.Linear(5, 5), second=nn.Linear(5, 3))

    network = zoo.seeded(build)
    batch = zoo.numbers(4, 5, out=(3,))
    model = private(copy.deepcopy(network), mode)
    assert_step_is_right(model, network, batch, loss=zoo.squared_error)


def test_new_triggers_serve_a_step_and_the_old_ones_come_back():
    network, batch = tokens_case()
    model = private(network, "bookkeeping")
    expected = clipped_sums(model, batch)
    before = [one.trigger for one in model.capture.trained]
    with model.capture.new_triggers():
        now = [one.trigger for one in model.capture.trained]
        assert not set(map(id, before)) & set(map(id, now))
        assert_close(clipped_sums(model, batch), expected, 0.0)
    assert all(one.trigger is x for one, x in zip(model.capture.trained, before, strict=True))
