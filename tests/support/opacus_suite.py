"""Opacus's own tests of per-sample gradients, run on `dp_clipping`.

Those of `opacus.tests.grad_samples` compare in one method, `GradSampleHooks_test.run_test`, which
is given a module and a batch. Here it is replaced. Each case runs in each mode and with both
reductions, as a private step of our engine without noise, and is compared with one backward per
sample in float64, which Opacus's own `compute_microbatch_grad_sample` runs. Three things must be
right:

    norms       of all samples
    the sum     clipped to a threshold that is below the largest norm
    gradients   of each sample: the sum of a step in which all other losses are multiplied by zero

Gradients are compared by Opacus's own `check_shapes` and `check_values`, with the tolerances of the
test. Importing this imports the tests, whose cases Hypothesis draws: the same ones each time.

The tests of `compute_embedding_norm_sample` have their norms in numbers; `our_norms` stands in for
that function.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import torch
from opacus.utils.per_sample_gradients_utils import (
    clone_module,
    compute_microbatch_grad_sample,
    unpack_packedsequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from tests.support.engine import on_any_batches

hypothesis.settings.register_profile(
    "opacus_suite",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("opacus_suite")  # before the tests take their settings from it

import opacus.tests.grad_samples as suite  # noqa: E402
from opacus.tests.grad_samples import embedding_norm_sample_test as norm_test  # noqa: E402
from opacus.tests.grad_samples.common import GradSampleHooks_test  # noqa: E402

MODES = ("per_sample", "ghost", "bookkeeping", "flash_bookkeeping")
REDUCTIONS = ("sum", "mean")
TINY = 2.0**-20  # of a sample whose gradient is read: exact, and no norm reaches the threshold
RTOL = 5e-5  # of norms, and of a sum relative to the threshold: clipping leaves a margin of 2e-5


@dataclass(frozen=True)
class Comparison:
    """One case in one mode with one reduction.

    Attributes:
        test: module and method of Opacus's.
        outcome: `right`, `wrong` or `raised`, as a refusal is.
        said: the message, where it is not right.
    """

    test: str
    mode: str
    outcome: str
    said: str = ""


def tests() -> dict[str, Callable[[], None]]:
    """Returns name -> what runs one of Opacus's tests whose cases are given to `run_test`."""
    found = {}
    for info in pkgutil.iter_modules(suite.__path__, suite.__name__ + "."):
        for kind in vars(importlib.import_module(info.name)).values():
            if not isinstance(kind, type) or GradSampleHooks_test not in kind.__bases__:
                continue
            for name in vars(kind):
                if name.startswith("test_") and name not in WITHOUT_COMPARISON:
                    test = f"{info.name.rpartition('.')[2]}.{name}"
                    found[test] = getattr(kind(name), name)
    return found


# Of a function of Opacus's, and of its module's gradients in a batch of one sample.
WITHOUT_COMPARISON = {"test_unfold2d", "test_asymetric_dilation_and_kernel_size"}


def norm_tests() -> dict[str, Callable[[], None]]:
    """Returns name -> what runs one of Opacus's tests of an embedding's norms; see `our_norms`."""
    kind = norm_test.TestComputeEmbeddingNormSample
    return {name: getattr(kind(name), name) for name in vars(kind) if name.startswith("test_")}


@dataclass(frozen=True)
class Case:
    """One case: the module and the batch of one call of `run_test`."""

    x: Any
    module: nn.Module
    batch_first: bool
    reduction: str
    chunk_method: Callable

    @property
    def args(self) -> tuple:
        return self.x if type(self.x) is tuple else (self.x,)

    @property
    def is_empty(self) -> bool:
        return type(self.x) is Tensor and self.x.numel() == 0

    @property
    def size(self) -> int:
        if isinstance(self.x, PackedSequence):
            return int(self.x.batch_sizes[0])
        if type(self.x) is tuple:
            return len(self.x[1])  # of ids with offsets
        return self.x.shape[0 if self.batch_first else 1]

    def reference(self) -> dict[str, Tensor]:
        """Returns name -> [B, ..], of one backward per sample in float64."""
        module = clone_module(self.module).double()
        if self.is_empty:
            named = module.named_parameters()
            return {n: p.detach().new_zeros(self.size, *p.shape) for n, p in named}
        x = _doubled(self.x)
        if isinstance(x, PackedSequence):
            x = unpack_packedsequences(x)
        found = compute_microbatch_grad_sample(
            x, module, self.batch_first, self.reduction, self.chunk_method
        )
        if isinstance(self.x, PackedSequence) and self.x.unsorted_indices is not None:
            found = {name: g[self.x.unsorted_indices] for name, g in found.items()}
        return found

    def of_outputs(self) -> Tensor:
        """Returns the gradients of the samples' L1 losses in the outputs, padded ones if packed.

        From float64: a number that rounding leaves on the other side of zero would have another.
        """
        with torch.no_grad():
            outputs = clone_module(self.module).double()(*_doubled(self.args))
        lengths = None
        if isinstance(outputs, PackedSequence):
            outputs, lengths = pad_packed_sequence(outputs, batch_first=True)
        elif not self.batch_first:
            outputs = outputs.transpose(0, 1)
        signs = outputs.sign()
        if self.reduction == "mean" and signs.numel():
            counts = signs[0].numel() if lengths is None else lengths * signs.shape[2]
            signs /= torch.as_tensor(counts).view(-1, *[1] * (signs.dim() - 1))
        return signs.float() if self.batch_first else signs.float().transpose(0, 1)


def _doubled(x: Any) -> Any:
    if type(x) is tuple:
        return tuple(map(_doubled, x))
    return x.double() if isinstance(x, PackedSequence) or x.is_floating_point() else x


class Losses:
    """Criterion of one loss per sample: Σ outputs · what the gradient shall be, times a weight."""

    def __init__(self, batch_first: bool):
        self.batch_first = batch_first

    def __call__(self, outputs: Any, gradients: Tensor, weights: Tensor) -> Tensor:
        if isinstance(outputs, PackedSequence):
            outputs = pad_packed_sequence(outputs, self.batch_first)[0]
        losses = outputs * gradients
        losses = losses if self.batch_first else losses.transpose(0, 1)
        return losses.flatten(1).sum(1) * weights


class Private:
    """Private steps of a case, which leave the parameters as they are."""

    def __init__(self, case: Case, of_outputs: Tensor, mode: str, max_grad_norm: float):
        self.case, self.of_outputs = case, of_outputs
        network = clone_module(case.module)
        self.parameters = dict(network.named_parameters())
        rows = max(1, case.size)
        run = on_any_batches(
            module=network, lr=0.0, criterion=Losses(case.batch_first), noise_multiplier=0.0,
            dataset=TensorDataset(torch.zeros(rows, 1)), batch_size=rows, grad_sample_mode=mode,
            max_grad_norm=max_grad_norm, batch_first=case.batch_first,
            loss_reduction=case.reduction,
        )  # fmt: skip
        self.model, self.optimizer, self.criterion = run.model, run.optimizer, run.criterion
        self.scale = rows if case.reduction == "mean" else 1

    def step(self, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the samples' norms, and the clipped sums."""
        self.optimizer.zero_grad()
        outputs = self.model(*self.case.args)
        self.criterion(outputs, self.of_outputs, weights).backward()
        norms = self.model.per_sample_gradient_norms
        self.optimizer.step()
        sums = {n: p.grad.detach() * self.scale for n, p in self.parameters.items()}
        return norms, sums

    def gradients(self) -> dict[str, Tensor]:
        """Returns name -> each sample's gradient [B, ..]."""
        rows = [self.step(one)[1] for one in TINY * torch.eye(self.case.size)]
        return {n: torch.stack([row[n] for row in rows]) / TINY for n in self.parameters}


@dataclass(frozen=True)
class Expected:
    """The gradients of each sample and their norms [B] that all modes must give, in float64."""

    case: Case
    gradients: dict[str, Tensor]
    norms: Tensor
    of_outputs: Tensor

    @classmethod
    def of(cls, case: Case) -> "Expected":
        gradients = case.reference()
        squares = [g[:, None].flatten(1).square().sum(1) for g in gradients.values()]
        return cls(case, gradients, torch.stack(squares).sum(0).sqrt(), case.of_outputs())

    def compare(self, mode: str, check: Callable) -> None:
        """Raises AssertionError where a step is not what one backward per sample says."""
        largest = max(self.norms.tolist(), default=0.0)
        clip_norm = 0.75 * largest or 1.0
        private = Private(self.case, self.of_outputs, mode, clip_norm)
        found, sums = private.step(torch.ones(self.case.size))
        torch.testing.assert_close(
            found.double(), self.norms, rtol=RTOL, atol=RTOL * largest, msg=_msg("norms")
        )
        coefficients = (clip_norm / self.norms).clamp(max=1)
        for name, g in self.gradients.items():
            torch.testing.assert_close(
                sums[name].double(), torch.tensordot(coefficients, g, dims=1),
                rtol=0, atol=RTOL * clip_norm * self.case.size, msg=_msg(f"clipped sum of {name}"),
            )  # fmt: skip
        if self.case.size:
            check(self.gradients, {n: g.double() for n, g in private.gradients().items()})


def _msg(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"


class Run:
    """Runs Opacus's tests and keeps what was compared.

    Args:
        modes: those of ours.
        every: 10 compares one in ten of the cases of a test.
    """

    def __init__(self, modes: tuple[str, ...] = MODES, every: int = 1):
        self.modes, self.every = modes, every
        self.comparisons: list[Comparison] = []
        self._test, self._cases = "", 0

    def run(self, name: str, test: Callable[[], None]) -> None:
        self._test, self._cases = name, 0
        torch.default_generator.manual_seed(0)  # torch.manual_seed asks for other devices first
        own = self

        def run_test(self, x, module, batch_first=True, atol=10e-6, rtol=10e-5, **options):
            chunk_method = options.get("chunk_method", iter)
            for reduction in REDUCTIONS:
                case = Case(x, module, batch_first, reduction, chunk_method)

                def check(expected, found, reduction=reduction):
                    self.check_shapes(expected, found, reduction)
                    self.check_values(expected, found, reduction, atol, rtol)

                own.take(case, check)
            own._cases += 1
            torch.default_generator.manual_seed(own._cases)  # which Hypothesis does not know

        with mock.patch.object(GradSampleHooks_test, "run_test", run_test):
            test()

    def take(self, case: Case, check: Callable) -> None:
        """Compares a case in all modes."""
        if self._cases % self.every != self.every // 2:
            return  # the first cases that Hypothesis draws are the smallest
        expected = Expected.of(case)
        for mode in self.modes:
            outcome, said = "right", ""
            try:
                expected.compare(mode, check)
            except AssertionError as error:
                outcome, said = "wrong", str(error)
            except Exception as error:
                outcome, said = "raised", f"{type(error).__name__}: {error}"
            self.comparisons.append(Comparison(self._test, mode, outcome, said))


@contextmanager
def our_norms(mode: str) -> Iterator[None]:
    """A context in which Opacus's norms of an embedding's gradients are those of a private step."""

    def norms(layer: nn.Module, inputs: list[Tensor], gradients: Tensor) -> dict[Any, Tensor]:
        case = Case(inputs[0], layer, batch_first=True, reduction="sum", chunk_method=iter)
        private = Private(case, gradients, mode, max_grad_norm=1.0)
        return {layer.weight: private.step(torch.ones(case.size))[0]}

    name = "compute_embedding_norm_sample"
    with mock.patch.object(norm_test.embedding_norm_sample, name, norms):
        yield
