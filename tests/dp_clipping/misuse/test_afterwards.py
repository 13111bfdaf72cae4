"""After a step that was refused nothing has moved or been accounted, and the next one goes.

A row does something wrong after a backward and says what is raised; what does not go away with
`zero_grad()` is put right by the last entry.
"""

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.dp_clipping.conftest import Unseen, private, private_loss
from tests.support import engine, zoo
from tests.support.backwards import with_backward
from tests.support.engine import CHANGED, CHANGES, UNCLIPPED

pytestmark = pytest.mark.filterwarnings("ignore:the batch of this step did not come from")
Row = tuple[str, Callable[[SimpleNamespace], object], str, dict[str, object]]
BATCH = engine.data()[:5]


@pytest.fixture
def run():
    return engine.build(noise_generator=None)


# Gradients that change between backward and the noise


GRADIENTS: list[Row] = [
    *((name, lambda run, change=change: change(run.model.network), CHANGED, {})
      for name, change in CHANGES.items()),
    ("an ordinary backward", engine.ordinary_backward, UNCLIPPED, {}),
]  # fmt: skip


# Settings and hooks


def sets(**values: object) -> Callable[[SimpleNamespace], None]:
    def change(run: SimpleNamespace) -> None:
        for name, value in values.items():
            setattr(run.optimizer, name, value)

    return change


def hooks(function: Callable) -> Callable[[SimpleNamespace], None]:
    return lambda run: run.optimizer.attach_step_hook(lambda optimizer: function(run, optimizer))


def fail(*_: object) -> None:
    raise ValueError("of the user's hook")


def count_again(run: SimpleNamespace, optimizer: object) -> None:
    run.engine.accountant.get_optimizer_hook_fn(sample_rate=0.25)(optimizer)


def change_a_gradient(run: SimpleNamespace, _: object) -> None:
    run.model.network[2].bias.grad.mul_(100)


BEYOND = "noise of standard deviation .* is beyond float32"
BEFORE_A_STEP: list[Row] = [
    *((f"noise beyond float32 by {beyond}", sets(**beyond), BEYOND, {"noise_multiplier": 0.0})
      for beyond in ({"noise_multiplier": 1e39}, {"noise_multiplier": 1e30, "max_grad_norm": 1e30},
                     {"noise_multiplier": 1e-30, "max_grad_norm": 1e-9})),
    *((f"expected_batch_size {wrong}", sets(expected_batch_size=wrong), "expected_batch_size",
       {"expected_batch_size": 6}) for wrong in (0, math.nan, "men", None)),
    *((f"loss_reduction {wrong}", sets(loss_reduction=wrong), "loss_reduction",
       {"loss_reduction": "mean"}) for wrong in (0, math.nan, "men", None)),
]  # fmt: skip
IN_A_STEP: list[Row] = [
    *((f"noise of {wrong}", sets(noise_multiplier=wrong), "noise_multiplier is",
       {"noise_multiplier": 1.0}) for wrong in (-1.0, math.nan, math.inf)),
    ("a hook that fails", hooks(fail), "of the user's hook", {"step_hook": None}),
    ("a hook that counts the step again", hooks(count_again),
     "counts every step by itself: remove the hook", {"step_hook": None}),
    ("a hook that changes a gradient", hooks(change_a_gradient), CHANGED, {"step_hook": None}),
    *((f"a hook that calls {name}", hooks(lambda _, own, name=name: getattr(own, name)()),
       "it runs within that step", {"step_hook": None}) for name in ("step", "pre_step")),
]  # fmt: skip


def rows(*tables: list[Row]) -> pytest.MarkDecorator:
    params = [
        pytest.param(*row[1:], id=row[0].replace(" ", "-")) for table in tables for row in table
    ]
    return pytest.mark.parametrize(("wrong", "message", "right"), params)


@rows(GRADIENTS, IN_A_STEP)
def test_a_step_that_was_refused(run, wrong, message, right):
    engine.backward(run, BATCH)
    before = engine.parameters(run)
    wrong(run)
    for apply in (run.optimizer.step, run.optimizer.pre_step):
        with pytest.raises((ValueError, RuntimeError), match=message):
            apply()
    assert all(map(torch.equal, before, engine.parameters(run)))
    assert (run.optimizer.steps, run.engine.accountant.history) == (0, [])
    sets(**right)(run)
    run.optimizer.zero_grad()
    engine.step(run)
    assert run.optimizer.steps == 1


@rows(BEFORE_A_STEP)
def test_settings_that_the_next_step_refuses(run, wrong, message, right):
    engine.step(run)
    before = engine.parameters(run)
    wrong(run)
    with pytest.raises(ValueError, match=message):
        engine.step(run)
    assert all(map(torch.equal, before, engine.parameters(run)))
    assert [n for _, _, n in run.engine.accountant.history] == [1]
    sets(**right)(run)
    engine.step(run)
    assert run.optimizer.steps == 2


@pytest.mark.parametrize("name", ["replaced", "an ordinary backward"])
def test_the_forward_of_the_next_microbatch_refuses_too(run, name):
    wrong, message = {row[0]: row[1:3] for row in GRADIENTS}[name]
    engine.backward(run, BATCH)
    wrong(run)
    with pytest.raises(RuntimeError, match=message):
        engine.backward(run, BATCH)


@pytest.mark.parametrize("right", [{"noise_multiplier": 1.0}, {"step_hook": None}])
def test_what_was_put_right_goes_without_another_backward(run, right):
    wrong = hooks(fail) if "step_hook" in right else sets(noise_multiplier=math.nan)
    engine.backward(run, BATCH)
    wrong(run)
    with pytest.raises(ValueError):
        run.optimizer.step()
    sets(**right)(run)
    run.optimizer.step()
    assert [n for _, _, n in run.engine.accountant.history] == [1]


def test_an_ordinary_backward_after_the_noise(run):
    engine.backward(run, BATCH)
    run.optimizer.pre_step()
    engine.ordinary_backward(run)
    with pytest.raises(RuntimeError, match=UNCLIPPED):
        run.optimizer.step()


def test_a_step_whose_noise_failed_is_no_step(run, monkeypatch):
    """Some gradients may have theirs: another attempt would add to it."""
    engine.backward(run, BATCH)
    before = engine.parameters(run)
    with monkeypatch.context() as patch:
        patch.setattr(run.model.gradient_buffer, "apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step()
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(RuntimeError, match="without a backward since the last one"):
        run.optimizer.step()
    assert all(map(torch.equal, before, engine.parameters(run)))
    engine.step(run)
    assert run.optimizer.steps == 2


@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_a_network_that_is_converted(run, convert, is_stepped):
    if is_stepped:
        engine.step(run)
    convert(run.model)
    x = BATCH[0].to(next(run.model.parameters()).dtype)
    with pytest.raises(RuntimeError, match=r"was torch\.float32 at make_private and is"):
        engine.step(run, (x, BATCH[1]))
    run.model.float().to("cpu")
    engine.step(run)


@pytest.mark.parametrize(
    "wrong",
    [{"noise_multiplier": 1e39}, {"max_grad_norm": [1.0], "clipping": "per_layer"},
     {"loss_reduction": "sum"}],
)  # fmt: skip
def test_a_refused_network_may_be_made_private(wrong):
    net = engine.network()
    with pytest.raises(ValueError):
        engine.build(module=net, **wrong)
    engine.step(engine.build(module=net, criterion=nn.CrossEntropyLoss()))


# A backward that failed


HELD = Unseen()


class Held(torch.autograd.Function):
    """The identity, with something large for its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.large = torch.zeros(1000)
        HELD.values.append(weakref.ref(ctx.large))
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        return gy


def may_fail(gy):
    """Not at first, in the search for samples that see each other."""
    if may_fail.is_on:
        raise torch.OutOfMemoryError("as if")


may_fail.is_on = False


class Branches(nn.Module):
    """When one branch fails in backward, the other one is ready."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = Held.apply(self.first(x))
        return self.one(x) * with_backward(self.other(x), may_fail)


@pytest.mark.parametrize("batches", [0, 2], ids=["in_a_check", "in_a_step"])
def test_a_backward_that_failed_keeps_no_activations(batches, monkeypatch):
    """A smaller batch after running out of memory must find it free."""
    network = Branches()
    model = private(network, "bookkeeping")
    batch = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(batches):
        private_loss(model, batch, zoo.product)
    monkeypatch.setattr(may_fail, "is_on", True)
    HELD.values.clear()
    with pytest.raises(torch.OutOfMemoryError):
        private_loss(model, batch, zoo.product).backward()
    model.step_state.pending = None  # as the next forward does
    gc.collect()
    assert HELD.values
    assert not any(held() is not None for held in HELD.values)
