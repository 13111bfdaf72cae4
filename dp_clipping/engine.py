"""`PrivacyEngine`: Opacus's interface, with the conventions of its ghost mode.

Code written for Opacus 1.6 with `grad_sample_mode="ghost"` runs with the import changed.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.accounting.target_epsilon import Plan
from dp_clipping.arguments.checks import checked
from dp_clipping.arguments.given import refuse_used
from dp_clipping.arguments.sampled import Sampled
from dp_clipping.arguments.settings import Settings
from dp_clipping.audit.audits import Audits
from dp_clipping.build import (
    TO_USER,
    build_criterion,
    build_loader,
    build_model,
    build_optimizer,
    certificate_for,
    noise_for_target,
    ranks_of,
)
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.clipping.coefficients import GAMMA
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.distributed.agreement import agree_on_settings
from dp_clipping.distributed.dtensor import size_of
from dp_clipping.model import PrivateModel
from dp_clipping.modes import DEFAULT_MODE
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.keys import fixed_keys, fresh_keys
from dp_clipping.optimizer import PrivateOptimizer
from dp_clipping.runs.checkpoints import Checkpoints
from dp_clipping.validation import check_module
from dp_clipping.verification.check import compare
from dp_clipping.verification.report import Check
from dp_clipping.verification.user_loss import Loss

MAKE = (
    "engine.make_private(module=network, optimizer=optimizer, data_loader=loader, "
    "criterion=criterion, noise_multiplier=1.0, max_grad_norm=1.0)"
)
MAKE_WITH_EPSILON = (
    "engine.make_private_with_epsilon(module=network, optimizer=optimizer, data_loader=loader, "
    "criterion=criterion, target_epsilon=8.0, target_delta=1e-5, epochs=3, max_grad_norm=1.0)"
)


class PrivacyEngine(Checkpoints, Audits):
    """Makes a network, its optimizer, criterion and loader private, and counts the privacy spent.

    Create one engine per data set. Call `make_private` once, train with the four objects that it
    returns, and call `get_epsilon(delta)` for the ε of the steps so far. `save_checkpoint` and
    `load_checkpoint` continue a run, `check` compares a step with its definition, and `audit`
    attacks a run. It has the public methods of Opacus's engine.

    Args:
        accountant: what computes ε: `"pld"`, the privacy loss distributions of dp-accounting, or
            one of Opacus's: `"prv"`, `"rdp"` (looser), `"gdp"` (an approximation that may be below
            the true ε; refused in secure mode and for `target_epsilon`).
        secure_mode: noise and batches come from a cryptographic generator, noise is of integers on
            a grid, and ε includes what all rounding costs (docs/mechanisms.md).
        hide_unprotected: reading what ε does not cover raises RuntimeError: per-sample norms, the
            count of non-finite samples, the loss in training, `check`, `audit`.
        checks: which batches are looked at, as docs/sharp_edges.md says: `"first"` (the first, and
            each doubling), `"sampled"` (one in 64 too) or `"off"` (none).
    """

    @checked(f'PrivacyEngine(accountant="pld"), and then {MAKE}', release="hide_unprotected")
    def __init__(
        self, *, accountant: str = "pld", secure_mode: bool = False, hide_unprotected: bool = False,
        checks: str = "first",
    ):  # fmt: skip
        super().__init__(accountant, secure=secure_mode)
        self._secure_mode, self._hide_unprotected = secure_mode, hide_unprotected
        self._checks = checks
        self._dataset: Any = None

    @property
    def secure_mode(self) -> bool:
        """Returns what the engine was created with."""
        return self._secure_mode

    @property
    def hide_unprotected(self) -> bool:
        """Returns what the engine was created with."""
        return self._hide_unprotected

    @property
    def release(self) -> bool:
        """Returns `hide_unprotected`, of which this is the old name."""
        warnings.warn("release is now hide_unprotected", DeprecationWarning, stacklevel=2)
        return self.hide_unprotected

    @checked(MAKE)
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Tensor] | None = None,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = DEFAULT_MODE,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        clipping_function: str = "abadi",
        gamma: float = GAMMA,
        expected_batch_size: float | None = None,
        norm_algorithm: str = "auto",
        memory_budget: int | None = None,
        tile_size: int | None = None,
        norm_reduction: str = "async",
        adaptive_threshold: AdaptiveThreshold | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        cuda_graph: bool = False,
        fused_step: bool = False,
        sample_rate: float | None = None,
        steps: int | None = None,
        noise_mechanism: str | CorrelatedNoise = "gaussian",
        examples_per_unit: int = 1,
        unit_ids: Sequence[Hashable] | None = None,
        examples_per_step: int | None = None,
        sampling: str = "poisson",
        max_batch_size: int | None = None,
        views: int = 1,
    ) -> tuple[Any, PrivateOptimizer, PrivateCriterion, DataLoader]:
        """Returns model, optimizer, criterion and loader for private training.

        Args:
            module: the network, sharded or not, or `ddp.wrap(name, network)`.
            optimizer: over parameters of the module.
            criterion: with a `reduction`; it is asked for one loss per sample. Default
                `nn.CrossEntropyLoss()`.
            data_loader: over a map-style dataset; its length sets the sample rate 1 / len, unless
                `sample_rate` does.
            noise_multiplier: σ; the noise has standard deviation σ · max_grad_norm. 0 is allowed.
            max_grad_norm: C, or one threshold per clipping group.
            batch_first: dimension 0 of the inputs counts the samples, else dimension 1.
            loss_reduction: `"mean"` divides the noisy sum by the expected batch size.
            poisson_sampling: False leaves the loader alone, and the stated ε does not hold.
            clipping: `"flat"`: one norm over all parameters; `"per_layer"`: one per module.
            noise_generator: its seed (rank 0's) fixes noise and sampling: for tests only.
            grad_sample_mode: one of `dp_clipping.MODES`.
            wrap_model: False returns the module itself as the model: of its own class, with its own
                methods. Its calls are private steps while it trains. The methods that only
                `PrivateModel` has are at `optimizer.model` then.
            rand_on_empty: an empty Poisson batch yields one of random values, as in Opacus.
            clipping_function: `"abadi"`, `"automatic"`, of which `gamma` is γ, or a name given to
                `dp_clipping.register_clipping_function`.
            expected_batch_size: of all ranks together; default the loader's batch size, times the
                ranks if it has a `DistributedSampler`. A public constant.
            norm_algorithm: of linear layers in the `flash` modes: `"auto"` (planned by cost),
                `"input_length"` (accumulated over tokens) or `"width"` (Gram matrices of tokens,
                whose allowance for rounding makes contributions smaller by up to T·2⁻¹⁷ of
                themselves where tokens do not cancel: planned up to 1024 tokens in 16 bit only).
            memory_budget: bytes that the `flash` modes' linear layers may keep from backward to
                their sums under flat clipping; what does not fit is formed in a second backward.
                Default: what an ordinary step would hold there, or nothing for `flash`.
            tile_size: rows and columns of the kernels' tiles, a power of two from 16 to 256;
                default: chosen by the kernels.
            norm_reduction: how norms are added up where tensor parallelism splits parameters:
                `"sync"` (one all-reduce that blocks), `"async"` (one that does not block the
                launch; flat clipping has nothing else to do before it waits) or `"layerwise"`
                (partial sums are sent during backward).
            adaptive_threshold: lets C follow a quantile of the norms, beginning with
                `max_grad_norm`. More noise on the gradient pays for its noisy counts, so a step
                costs what `noise_multiplier` says.
            data_parallel_group: of a tensor-parallel module, the ranks that have the same parts of
                it and other samples. Its parameters become those of the group's first rank.
            cuda_graph: whole steps are to run as one CUDA graph: `step = optimizer.graphed(body)`.
                On one GPU, in mode `flash_bookkeeping`, with an optimizer that is capturable.
            fused_step: the noise kernel takes AdamW's, Adam's or SGD's step; `.grad` is None then.
            sample_rate: probability q of each sample to be in a batch, as a public constant.
                Default: 1 / len(data_loader), which depends on the size of the data. A sample more
                or less can change it, and the guarantee then covers only data of one size.
            steps: batches of an epoch, which the returned loader yields. Default: 1 / q, rounded.
            noise_mechanism: `"gaussian"`, a name given to `dp_clipping.register_noise_mechanism`,
                whose account then says ε, or `CorrelatedNoise(bands=8, epochs=2)` with
                `sampling="cyclic"`, for which σ and C must stay the same.
            examples_per_unit: k: so many consecutive examples are one unit of privacy (a user, a
                document), which is sampled and clipped as a whole: the gradient of a unit, summed
                over its examples, has at most norm C. A unit with fewer is filled up with examples
                that are masked. A batch of the loader has batch_size / k units;
                `expected_batch_size` and `sample_rate` are those of units.
            unit_ids: the unit of each example of the data set, at most k examples of each.
                Default: k consecutive examples of the data set are a unit.
            examples_per_step: m: a step takes so many of a unit's examples, drawn anew in each step
                without replacement, and clips the sum of their gradients. A batch of the loader has
                batch_size / m units. With `unit_ids`, k may be left out (k = 1 is the same): units
                then have any number of examples.
            sampling: how the units of a batch are chosen, each with an account of its own:
                `"poisson"`; `"truncated_poisson"` (at most `max_batch_size`); `"balls_in_bins"`
                (every unit in one batch of each epoch, which it chooses at random); `"cyclic"`
                (every unit in the same batch of each epoch; ε is for replacing a unit by an empty
                one). See docs/mechanisms.md.
            max_batch_size: most units of a batch, of all ranks; of more a random subset is kept.
            views: v, augmentation multiplicity (De et al. 2022, arXiv:2204.13650): the data set is
                asked v times for each sample of a batch, and the mean gradient of these v rows is
                clipped. ε is as without. Batch sizes and the divisor count samples, and the rows of
                a batch are v times as many.

        Raises:
            ValueError: for an argument that is out of range or differs between ranks, for an
                optimizer of other parameters, or for a module that mixes samples. The message
                names it and what to use instead.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        if criterion is None:
            given["criterion"] = nn.CrossEntropyLoss()
        refuse_used(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader
        )
        return self._build(Settings(**given, secure_mode=self.secure_mode, checks=self._checks))

    @checked(MAKE_WITH_EPSILON)
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Tensor] | None = None,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        max_grad_norm: float | list[float],
        epsilon_tolerance: float = 0.01,
        alphas: Sequence[float] | None = None,
        stop: bool = False,
        **arguments: Any,
    ) -> tuple[Any, PrivateOptimizer, PrivateCriterion, DataLoader]:
        """Makes training private with the noise for which `epochs` epochs spend (ε, δ).

        Further arguments are those of `make_private`; `sample_rate` and `steps` among them are
        what ε is computed from. With `steps`, `epochs` may be left out and is 1. The search for
        the noise ends when ε is at most `epsilon_tolerance` below its target, and tries the Rényi
        orders `alphas` if the accountant is `"rdp"`.

        A step beyond these epochs, or with less noise, warns once with the ε that it leads to. With
        `stop`, the returned loader yields no batch for training after them, so that loops end, and
        `optimizer.step()` on any other batch raises RuntimeError.

        Warns if the accountant has counted steps already, because the budget is assumed to be
        unspent. Raises ValueError for a target that needs (almost) no noise, and with accountant
        `"gdp"`.
        """
        if "noise_multiplier" in arguments:
            raise ValueError(
                "noise_multiplier is what target_epsilon determines: leave it out, or call "
                "make_private(noise_multiplier=..)"
            )
        training = Sampled.of(arguments, data_loader=data_loader)
        if epochs is None and arguments.get("steps") is None:
            raise ValueError(
                "epochs is missing: give epochs=, or steps=, the number of batches of the training"
            )
        epochs = 1 if epochs is None else epochs
        target = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        self._warn_of_delta(target_delta, training.units_of_data, 3)
        if len(self.accountant) > 0 or self._runs:
            has = "accountant has counted steps" if len(self.accountant) else "make_private ran"
            warnings.warn(
                "make_private_with_epsilon takes the whole budget to be unspent, but this engine's "
                f"{has} already: the total will be above target_epsilon if both are trained; "
                "create a PrivacyEngine for each",
                stacklevel=3,
            )
        steps = epochs * training.rates[1]
        noise_multiplier = noise_for_target(
            self, module, training, steps=steps, **target, epsilon_tolerance=epsilon_tolerance,
            alphas=alphas, expected_batch_size=arguments.get("expected_batch_size"),
        )  # fmt: skip
        private = self.make_private(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, **arguments,
        )  # fmt: skip
        plan = Plan(target_epsilon, target_delta, steps, noise_multiplier, stop)
        self._runs[-1].follow(plan)
        return private

    @checked()
    def check(self, model: PrivateModel, batch: Any, *, loss: Loss | None = None) -> Check:
        """Compares a private step with one non-private backward per sample: `print` the result.

        Both sides run the user's own network. The private side runs in its mode, with its current
        thresholds. The other side runs one sample at a time, without captured layers, and computes
        norms and the clipped sum in float64. This takes 12 bytes per trainable parameter in
        addition to a step's memory. Meanwhile the network is in evaluation and TensorFloat-32 is
        off, so dropout is not part of the comparison. Other randomness counts as an error.

        Training is not affected: parameters, `.grad`, norms, step count, account, noise, batches,
        torch's random states and what ranks exchange stay as they are. Each rank checks a batch of
        its own. The batch and the report are private data: ε covers neither.

        Args:
            model: as `make_private` returned it, not sharded.
            batch: as the loader yields it: tensors in tuples, lists and dicts, of which dimension 0
                counts the samples (of inputs 1, with `batch_first=False`).
            loss: called as `loss(model, criterion, batch)`, of the batch and of one sample at a
                time; returns what the criterion returns. Default: `criterion(model(x), y)` of a
                pair.

        Raises:
            RuntimeError: with `hide_unprotected=True`, or in the middle of a step.
            ValueError: for a model of another engine, sharded or of mode `no_dp`, an empty batch,
                or a loss that is not one per sample.
        """
        run = self._run_of(model, None, None, "model")
        with run.model.reached():
            return compare(run, batch, loss)

    @classmethod
    @checked()
    def is_compatible(
        cls, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Returns whether `make_private` would take the module."""
        try:
            check_module(module)
        except ValueError:
            return False
        return True

    @classmethod
    @checked()
    def validate(cls, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raises ValueError naming the modules that mix samples, with replacements."""
        check_module(module)

    @classmethod
    @checked()
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Returns a copy in which Opacus's fixes have replaced modules that mix samples."""
        from opacus.validators import ModuleValidator

        fixed = ModuleValidator.fix(module)
        check_module(fixed)
        return fixed

    def _build(
        self, settings: Settings
    ) -> tuple[Any, PrivateOptimizer, PrivateCriterion, DataLoader]:
        """Builds what `make_private` returns, from the ranks up, and keeps it as a run."""
        mechanism = settings.mechanism
        self._refuse_other_units(settings.unit)
        self._refuse_other_mechanism(mechanism)
        ranks = ranks_of(settings)
        generator, to_all = settings.noise_generator, (ranks.everyone, ranks.device)
        keys = fixed_keys(generator, *to_all) if generator else fresh_keys(*to_all)
        self._note_dataset(settings.data_loader)
        loader = build_loader(settings, ranks, keys)
        settings = settings.with_batch_size(size_of(ranks.data_parallel_group))
        agree_on_settings(
            settings.compared()
            | {
                "accountant": self._account.accountant.mechanism(),
                "hide_unprotected": self.hide_unprotected,
            },
            ranks.everyone,
        )
        model = build_model(settings, ranks, loader, self.hide_unprotected)
        criterion = build_criterion(settings, model)
        optimizer = build_optimizer(settings, ranks, model, keys, self._count)
        run = PrivateRun(
            model, optimizer, loader, ranks.everyone, keys, settings.public(), self._account,
            criterion, certificate=certificate_for(settings, model),
            units_digest=settings.unit[1].hex(), public_constants=settings.public_constants,
        )  # fmt: skip
        if run.certificate is not None:
            self._account.cover(run.certificate)
        if run.certificate is not None or mechanism.epsilon is not None:
            self._account.refuse_direct(computes=mechanism.epsilon is None)
        self._runs.append(run)
        return model.returned, optimizer, criterion, loader

    def _note_dataset(self, loader: DataLoader) -> None:
        if self._dataset is not None and self._dataset is not loader.dataset:
            warnings.warn(
                "this engine has accounted for another dataset: ε is a property of one dataset, "
                "use a PrivacyEngine for each",
                stacklevel=TO_USER,
            )
        self._dataset = loader.dataset
