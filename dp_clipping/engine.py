"""`PrivacyEngine`: Opacus's interface and accountants, with the conventions of its ghost mode.

Code written for Opacus 1.6 with `grad_sample_mode="ghost"` runs with the import changed.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.accounting.ledger import Account, Step
from dp_clipping.accounting.statement import PrivacyStatement, statement_of
from dp_clipping.accounting.target_epsilon import noise_multiplier_for
from dp_clipping.arguments.checks import (
    check_rates,
    check_target,
    check_units,
    given_units,
    rates_of,
    renamed,
)
from dp_clipping.arguments.opacus_names import (
    ARGUMENTS,
    TARGETS,
    FourValues,
    described,
    refuse_opacus,
)
from dp_clipping.arguments.settings import Settings
from dp_clipping.build import (
    TO_USER,
    build_criterion,
    build_loader,
    build_model,
    build_optimizer,
    keys_for,
    ranks_of,
    refuse_private,
)
from dp_clipping.checkpoint import save_load as checkpoint
from dp_clipping.checkpoint.file_format import file_name, given_schedulers, key_file
from dp_clipping.checkpoint.run import PrivateRun, Snapshot
from dp_clipping.checkpoint.weights import known
from dp_clipping.clipping.coefficients import GAMMA
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.distributed.agreement import agree_on_settings
from dp_clipping.kinds import WrongType, check_count, check_type, shown
from dp_clipping.model import PrivateModel
from dp_clipping.modes import DEFAULT_MODE
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.mechanisms import NoiseMechanism, mechanism_of, refuse_mixed
from dp_clipping.optimizer import PrivateOptimizer
from dp_clipping.profiling.metrics import StepMetrics
from dp_clipping.validation import check_module
from dp_clipping.verification.check import Loss, compare
from dp_clipping.verification.report import Check

if TYPE_CHECKING:
    from opacus.accountants.accountant import IAccountant


class PrivacyEngine:
    """Makes a network, its optimizer, criterion and loader private, and counts the privacy spent.

    Create one engine per data set. Call `make_private` once, train with the four objects that it
    returns, and call `get_epsilon(delta)` for the ε of the steps so far. `save_checkpoint` and
    `load_checkpoint` continue a run, and `check` compares a step with its definition.

    It has the public methods of Opacus's engine. `dp_clipping.build` makes the objects.

    Args:
        accountant: `"prv"`, `"rdp"` or `"gdp"`, Opacus's own.
        secure_mode: not supported: the noise is counter-based, not cryptographic.
        hide_unprotected: reading what ε does not cover raises RuntimeError: per-sample norms, the
            count of non-finite samples, the loss in training, `check`.
    """

    @renamed(release="hide_unprotected")
    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, hide_unprotected: bool = False
    ):
        if secure_mode:
            raise ValueError(
                "secure_mode=True is not supported: noise comes from a counter-based generator, "
                "and attacks on floating point are out of scope; use Opacus with torchcsprng"
            )
        check_type("accountant", accountant, str, '"prv", "rdp" or "gdp"')
        check_type("hide_unprotected", hide_unprotected, bool, "True or False")
        try:
            from opacus.accountants import create_accountant  # importing Opacus takes seconds

            self._account = Account(create_accountant(mechanism=accountant))
        except ValueError as error:
            raise ValueError(f'accountant: {error}; give "prv", "rdp" or "gdp"') from error
        self.secure_mode = False
        self.hide_unprotected = hide_unprotected
        self._runs: list[PrivateRun] = []
        self._dataset: Any = None
        self._noise_mechanism = "gaussian"

    @property
    def release(self) -> bool:
        """The old name of `hide_unprotected`."""
        warnings.warn("release is now hide_unprotected", DeprecationWarning, stacklevel=2)
        return self.hide_unprotected

    @property
    def accountant(self) -> "IAccountant":
        """Opacus's accountant. It may be replaced by one that has counted all of its steps.

        Setting one that lacks steps of this engine raises ValueError.
        """
        return self._account.accountant

    @accountant.setter
    def accountant(self, accountant: "IAccountant") -> None:
        if self._mechanism is not None:
            raise ValueError(
                f"ε comes from the account of noise mechanism {self._noise_mechanism!r}, and steps "
                "of another accountant had other noise: leave engine.accountant as it is"
            )
        self._account.replace(accountant)

    # ---- what a user calls ----------------------------------------------------------------------

    @renamed(
        {name: described(name, instead) for name, instead in ARGUMENTS.items()} | TARGETS,
        data_group="data_parallel_group",
    )
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
        sample_rate: float | None = None,
        steps: int | None = None,
        noise_mechanism: str = "gaussian",
        examples_per_unit: int = 1,
        unit_ids: Sequence[Hashable] | None = None,
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
            sample_rate: probability q of each sample to be in a batch, as a public constant.
                Default: 1 / len(data_loader), which depends on the size of the data. A sample more
                or less can change it, and the guarantee then covers only data of one size.
            steps: batches of an epoch, which the returned loader yields. Default: 1 / q, rounded.
            noise_mechanism: `"gaussian"`, or a name given to
                `dp_clipping.register_noise_mechanism`, whose account then says ε.
            examples_per_unit: k: so many consecutive examples are one unit of privacy (a user, a
                document), which is sampled and clipped as a whole: the gradient of a unit, summed
                over its examples, has at most norm C. A unit with fewer is filled up with examples
                that are masked. A batch of the loader has batch_size / k units;
                `expected_batch_size` and `sample_rate` are those of units.
            unit_ids: the unit of each example of the data set, at most k examples of each.
                Default: k consecutive examples of the data set are a unit.

        Raises:
            ValueError: for an argument that is out of range or differs between ranks, for an
                optimizer of other parameters, or for a module that mixes samples. The message
                names it and what to use instead.
        """
        criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        refuse_private(module, optimizer, criterion, data_loader)
        refuse_opacus(module, optimizer, criterion, data_loader)
        settings = Settings(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
            batch_first=batch_first, loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling, clipping=clipping,
            noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model, rand_on_empty=rand_on_empty,
            clipping_function=clipping_function, gamma=gamma,
            expected_batch_size=expected_batch_size, norm_algorithm=norm_algorithm,
            memory_budget=memory_budget, tile_size=tile_size, norm_reduction=norm_reduction,
            adaptive_threshold=adaptive_threshold, data_parallel_group=data_parallel_group,
            cuda_graph=cuda_graph, sample_rate=sample_rate, steps=steps,
            noise_mechanism=noise_mechanism, examples_per_unit=examples_per_unit,
            unit_ids=unit_ids,
        )  # fmt: skip
        return self._build(settings)

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
        **arguments: Any,
    ) -> tuple[Any, PrivateOptimizer, PrivateCriterion, DataLoader]:
        """Makes training private with the noise for which `epochs` epochs spend (ε, δ).

        Further arguments are those of `make_private`; `sample_rate` and `steps` among them are
        what ε is computed from. With `steps`, `epochs` may be left out and is 1. The search for
        the noise ends when ε is at most `epsilon_tolerance` below its target, and tries the Rényi
        orders `alphas` if the accountant is `"rdp"`.

        Warns if the accountant has counted steps already, because the budget is assumed to be
        unspent. Raises ValueError for a target that needs (almost) no noise.
        """
        if "noise_multiplier" in arguments:
            raise ValueError(
                "noise_multiplier is what target_epsilon determines: leave it out, or call "
                "make_private(noise_multiplier=..)"
            )
        if arguments.get("noise_mechanism", "gaussian") != "gaussian":
            raise ValueError(
                "target_epsilon is for Gaussian noise: find the noise with the epsilon function of "
                "your mechanism, and call make_private(noise_multiplier=.., noise_mechanism=..)"
            )
        check_type("data_loader", data_loader, DataLoader, "a torch.utils.data.DataLoader")
        rate, steps = arguments.get("sample_rate"), arguments.get("steps")
        is_poisson = arguments.get("poisson_sampling", True)
        check_rates(rate, steps, is_poisson)
        each, unit_ids = arguments.get("examples_per_unit", 1), arguments.get("unit_ids")
        check_units(
            each, unit_ids, poisson_sampling=is_poisson,
            rand_on_empty=arguments.get("rand_on_empty", False),
        )  # fmt: skip
        units = given_units(data_loader, each, unit_ids, is_poisson)
        if epochs is None and steps is None:
            raise ValueError(
                "epochs is missing: give epochs=, or steps=, the number of batches of the training"
            )
        epochs = 1 if epochs is None else epochs
        check_target(target_epsilon, target_delta, epochs)
        rate, steps = rates_of(data_loader, rate, steps, units)
        if len(self.accountant) > 0:
            warnings.warn(
                "make_private_with_epsilon takes the whole budget to be unspent, but this engine's "
                "accountant has counted steps already: the total will be above target_epsilon",
                stacklevel=2,
            )
        noise_multiplier = noise_multiplier_for(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            steps=epochs * steps,
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=epsilon_tolerance,
            alphas=alphas,
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            **arguments,
        )

    def get_epsilon(self, delta: float) -> float:
        """Returns ε spent so far at this δ; infinite if a step had no noise (as in mode `no_dp`).

        Raises ValueError unless 0 < δ < 1; it should be far below one over the number of samples.
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta is {delta}: give a number above 0, far below 1 / samples")
        if any(run.keys.fixed for run in self._runs):
            warnings.warn(
                "noise and sampling come from a fixed seed: anyone who knows it can subtract the "
                "noise, and ε means nothing",
                stacklevel=2,
            )
        mechanism = self._mechanism
        return self._account.epsilon(delta, None if mechanism is None else mechanism.epsilon)

    def privacy_statement(self, delta: float) -> PrivacyStatement:
        """Returns the guarantee at this δ with all that it depends on: `print` it.

        `as_dict()` has the same as numbers and strings.

        Raises:
            RuntimeError: before `make_private`.
            ValueError: unless 0 < δ < 1.
        """
        if not self._runs:
            raise RuntimeError(
                "nothing is private yet: call engine.make_private(..) before privacy_statement"
            )
        return statement_of(
            self._runs,
            self._account.history,
            accountant=(
                self.accountant.mechanism()
                if self._mechanism is None
                else f"that of noise mechanism {self._mechanism.name!r}"
            ),
            epsilon=self.get_epsilon(delta),
            delta=delta,
        )

    def on_step(
        self,
        call: Callable[[dict[str, Any]], object],
        *,
        delta: float | None = None,
        unprotected: Sequence[str] = (),
        every: int = 1,
    ) -> None:
        """Calls `call(metrics)` after each step of what `make_private` has returned so far.

        The metrics are `step`, and the σ (`noise_multiplier`) and C (`max_grad_norm`) of that step.
        ε covers them, and `epsilon`. What it does not cover is apart, in a dict
        `metrics["unprotected"]`, and there only if asked for by name. Every rank calls this, and
        the callback on each gets the same, of the samples of all ranks.

        Args:
            call: a function of one dict of numbers.
            delta: adds `epsilon`, spent so far at this δ.
            unprotected: of `"loss"` (the mean over the step's samples), `"samples"` (how many),
                `"clipped_fraction"`, `"median_norm"` and `"nonfinite_samples"`.
            every: 2 leaves out every other step, and so on: ε and norms take time.

        Raises:
            RuntimeError: before `make_private`; for `unprotected` with `hide_unprotected=True`.
            ValueError: for an unknown name, or mode `no_dp`, which has no norms.
        """
        if not callable(call):
            raise WrongType(f"call is {shown(call)}: give a function of a dict of metrics")
        check_count("every", every, "a whole number of steps, 1 or more")
        if every < 1:
            raise ValueError(f"every is {every}: give 1 or more")
        if delta is not None:
            check_target(1.0, delta, 1)
        if not self._runs:
            raise RuntimeError(
                "nothing is private yet: call engine.make_private(..) before on_step"
            )
        epsilon = None if delta is None else partial(self.get_epsilon, delta)
        metrics = StepMetrics(call, epsilon, unprotected, every)
        for run in self._runs:
            metrics.attach(run.model, run.optimizer)

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
        run = self._run_of(model, None, None)
        with run.model.reached():
            return compare(run, batch, loss)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike,
        module: PrivateModel,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
        data_loader: DataLoader | None = None,
        key_path: str | os.PathLike | None = None,
        weights: str = "all",
    ) -> None:
        """Writes a checkpoint to `path` and the key to `path` + `".key"`; see `checkpoint`.

        Every rank calls it between two steps, and rank 0 writes. If the process is killed
        meanwhile, the old or the new checkpoint can be loaded. The loader's position, the number of
        steps and torch's random states are always saved.

        Args:
            path: a file name; of a model sharded by FSDP2 or tensor parallelism, the name of a
                folder to which every rank writes its part.
            module: as `make_private` returned it.
            optimizer: as `make_private` returned it. Without it the state of the wrapped one
                (momentum) is not saved.
            noise_scheduler: Opacus's; its state is saved.
            grad_clip_scheduler: Opacus's; its state is saved.
            checkpoint_dict: further entries of the user's (a learning-rate scheduler's
                `state_dict()`, say): tensors, numbers, strings, in lists, tuples or dicts.
            module_state_dict_kwargs: for the network's `state_dict`.
            torch_save_kwargs: for `torch.save`.
            data_loader: as `make_private` returned it.
            key_path: another place of the key.
            weights: `"all"` of the network's weights are written, or its `"trainable"` ones, or
                `"none"`. Load the others before `load_checkpoint`, which compares their digest.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: for a module that is not of this engine, or entries that a load could not
                read without executing code.
        """
        snapshot = Snapshot(
            run=self._run_of(module, optimizer, data_loader),
            path=file_name(path),
            with_optimizer=optimizer is not None,
            schedulers=given_schedulers(noise_scheduler, grad_clip_scheduler),
            module_kwargs=module_state_dict_kwargs or {},
            torch_kwargs=torch_save_kwargs or {},
            key_file=key_file(path, key_path),
            weights=known(weights),
        )
        checkpoint.save(snapshot, checkpoint_dict or {})

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike,
        module: PrivateModel,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
        data_loader: DataLoader | None = None,
        new_keys: bool = False,
        key_path: str | os.PathLike | None = None,
    ) -> dict[str, Any]:
        """Continues a saved run, bit for bit, after a `make_private` with the same arguments.

        Every rank calls it. Nothing is changed unless everything fits, on every rank. No code from
        the file is executed. The engine's account becomes the saved one, and keeps what this
        engine has counted beyond it (with a warning). Steps that the saved key then makes again
        are not counted twice. With another σ or C than before, or of another batch, they raise
        RuntimeError. A folder or file may have been saved on another number of ranks, sharded or
        not.

        Args:
            path: as given to `save_checkpoint`.
            module: as `make_private` returned it.
            optimizer: as `make_private` returned it.
            data_loader: as `make_private` returned it.
            noise_scheduler: made as before; it receives the saved state.
            grad_clip_scheduler: made as before; it receives the saved state.
            module_load_dict_kwargs: for the network's `load_state_dict`.
            torch_load_kwargs: for `torch.load`; tensors come to the CPU by default.
            new_keys: continue with a new key for noise and samples. Needed if the key file is lost,
                the data have changed, or another continuation of this checkpoint is published. A
                new key is also made, with a warning, for another σ, C, clipping, number of ranks
                or kind of device, and if a scheduler or optimizer is missing in the checkpoint or
                here.
            key_path: as given to `save_checkpoint`.

        Returns:
            The entries of `checkpoint_dict`, and those of module and accountant, as in Opacus.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is cut short, of another run, or without its key, or accountant gdp
                would have to hold steps of two kinds. The message has one line.
        """
        snapshot = Snapshot(
            run=self._run_of(module, optimizer, data_loader),
            path=file_name(path),
            with_optimizer=optimizer is not None,
            schedulers=given_schedulers(noise_scheduler, grad_clip_scheduler),
            module_kwargs=module_load_dict_kwargs or {},
            torch_kwargs=torch_load_kwargs or {},
            key_file=key_file(path, key_path),
        )
        return checkpoint.load(snapshot, new_keys)

    @classmethod
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
    def validate(cls, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raises ValueError naming the modules that mix samples, with replacements."""
        check_module(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Returns a copy in which Opacus's fixes have replaced modules that mix samples."""
        from opacus.validators import ModuleValidator

        fixed = ModuleValidator.fix(module)
        check_module(fixed)
        return fixed

    # ---- the account and the runs ---------------------------------------------------------------

    def _count(self, optimizer: PrivateOptimizer, sample_rate: float) -> None:
        """Counts a step, before it changes a parameter; once, also if it is made again."""
        with self._account.unchanged():
            optimizer.hooks.run(optimizer)
        (run,) = (run for run in self._runs if run.optimizer is optimizer)
        is_private = optimizer.model.policy is not None
        step = Step(
            run.keys.fingerprint,
            optimizer.steps,
            sigma=optimizer.step_state.settings.noise_multiplier if is_private else 0.0,
            rate=sample_rate * optimizer.accumulated_iterations,
            clip_norms=tuple(optimizer.step_state.clip_norms) if is_private else (),
            batch_number=optimizer.step_state.batch_number,
        )
        self._account.count(step, key_is_fixed=run.keys.fixed)

    def _run_of(self, module: Any, optimizer: Any, loader: Any) -> PrivateRun:
        for run in self._runs:
            if module in (run.model, run.model.returned):
                for name, given, own in (
                    ("optimizer", optimizer, run.optimizer),
                    ("data_loader", loader, run.loader),
                ):
                    if given is not None and given is not own:
                        raise ValueError(
                            f"{name} is not the one that make_private returned with this module"
                        )
                return run
        raise ValueError("module is not one that this engine's make_private returned")

    # ---- a run ----------------------------------------------------------------------------------

    def _build(
        self, settings: Settings
    ) -> tuple[Any, PrivateOptimizer, PrivateCriterion, DataLoader]:
        """Builds what `make_private` returns, from the ranks up, and keeps it as a run."""
        self._refuse_other_units(settings)
        self._refuse_other_noise(settings)
        ranks = ranks_of(settings)
        keys = keys_for(settings, ranks)
        self._note_dataset(settings.data_loader)
        loader = build_loader(settings, ranks, keys)
        settings = settings.with_batch_size(ranks.data_ranks)
        own = {
            "accountant": self.accountant.mechanism(), "hide_unprotected": self.hide_unprotected
        }  # fmt: skip
        agree_on_settings(settings.compared() | own, ranks.everyone)
        model = build_model(settings, ranks, loader, self.hide_unprotected)
        criterion = build_criterion(settings, model)
        public = settings.public()
        count = partial(self._count, sample_rate=public["sample_rate"])
        optimizer = build_optimizer(settings, ranks, model, keys, count)
        self._runs.append(
            PrivateRun(
                model, optimizer, loader, ranks.everyone, keys, public, self._account, criterion
            )
        )
        return cast(Any, FourValues((model.returned, optimizer, criterion, loader)))

    @property
    def _mechanism(self) -> NoiseMechanism | None:
        """Returns the noise mechanism of all runs; None: Gaussian noise."""
        return mechanism_of(self._noise_mechanism)

    def _refuse_other_noise(self, settings: Settings) -> None:
        """Raises ValueError if no account covers this noise and the steps so far."""
        refuse_mixed(
            settings.noise_mechanism, self._noise_mechanism, bool(self._runs), self._account.history
        )
        self._noise_mechanism = settings.noise_mechanism

    def _refuse_other_units(self, settings: Settings) -> None:
        """Raises ValueError if the account says ε of other units than those of these settings."""
        before = {run.settings["examples_per_unit"] for run in self._runs}
        if before - {settings.examples_per_unit}:
            raise ValueError(
                f"examples_per_unit is {settings.examples_per_unit}, and this engine has accounted "
                f"for units of {min(before)}: ε of both together is that of neither, use a "
                "PrivacyEngine for each"
            )

    def _note_dataset(self, loader: DataLoader) -> None:
        if self._dataset is not None and self._dataset is not loader.dataset:
            warnings.warn(
                "this engine has accounted for another dataset: ε is a property of one dataset, "
                "use a PrivacyEngine for each",
                stacklevel=TO_USER,
            )
        self._dataset = loader.dataset
