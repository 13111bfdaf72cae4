"""The arguments of private training: what each one may be, in one table.

`check(name, value)` looks an argument up. σ, the divisor and the reduction are looked up again in
each step, because schedulers may change them. What must fit together is checked where the values
meet: in `sampled`, `settings` and `thresholds`.
"""

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping.arguments.thresholds import LARGEST
from dp_clipping.clipping.coefficients import known_clipping_functions
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from dp_clipping.kinds import (
    Argument,
    WrongType,
    file,
    instance_of,
    is_count,
    is_number,
    is_path,
    number,
    positive,
    shown,
    whole,
)
from dp_clipping.modes import MODES
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.planning.plan import NORM_ALGORITHMS
from dp_clipping.sampling.schemes import SAMPLINGS
from dp_clipping.trials.schedule import LEVELS

Function = TypeVar("Function", bound=Callable)

CLIPPINGS = ("flat", "per_layer")
LOSS_REDUCTIONS = ("mean", "sum")
TILE_SIZES = (16, 32, 64, 128, 256)
WEIGHTS = ("all", "trainable", "none")


@dataclass(frozen=True)
class Choice:
    """An argument that is one of some names; `names` is called for them."""

    names: Callable[[], Sequence[Any]]
    more: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises WrongType or ValueError for a value that is no such name."""
        choose = f"choose one of {', '.join(map(str, self.names()))}{self.more}"
        if not (isinstance(value, str) or is_count(value)):
            raise WrongType(f"{name} is {shown(value)}: {choose}")
        if value not in self.names():
            raise ValueError(f"{name} {value!r} is unknown: {choose}")


def _are_names(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _entries(wanted: str) -> Argument:
    return Argument(wanted, lambda value: isinstance(value, Mapping) and _are_names(value))


FLAG = instance_of(bool, "True or False")
FLAGS = (
    "new_keys", "strict", "assign", "set_to_none", "do_skip", "secure_mode", "hide_unprotected",
    "batch_first", "poisson_sampling", "wrap_model", "rand_on_empty", "cuda_graph", "fused_step",
    "stop", "pad_batches", "log_unprotected",
)  # fmt: skip
OPTIONS = (
    "module_state_dict_kwargs", "module_load_dict_kwargs", "torch_save_kwargs", "torch_load_kwargs",
)  # fmt: skip
SCHEDULER = Argument(
    "a scheduler of opacus.schedulers, or None",
    lambda value: not isinstance(value, type) and hasattr(value, "state_dict"),
)
COUNT = whole("a whole number of 1 or more")
DELTA = number("a number above 0, far below 1 / samples", lambda value: 0 < value < 1)
ARGUMENTS: dict[str, Argument | Choice] = {
    # objects
    "module": Argument(
        "the network, a torch.nn.Module, and no ScriptModule, whose layers are hidden",
        lambda x: isinstance(x, nn.Module) and not isinstance(x, torch.jit.ScriptModule),
    ),
    "optimizer": Argument(
        "a torch.optim.Optimizer over module.parameters()",
        lambda x: not isinstance(x, type) and hasattr(x, "param_groups"),
    ),
    "criterion": Argument(
        "a callable that has a reduction, such as nn.CrossEntropyLoss()",
        lambda value: callable(value) and not isinstance(value, type),
    ),
    "data_loader": instance_of(
        DataLoader, "a torch.utils.data.DataLoader, as DataLoader(dataset, batch_size=64)"
    ),
    "noise_generator": instance_of(
        torch.Generator, "torch.Generator().manual_seed(..), for tests only, or None"
    ),
    "adaptive_threshold": instance_of(
        AdaptiveThreshold, "a dp_clipping.noise.adaptive_threshold.AdaptiveThreshold, or None"
    ),
    "data_parallel_group": instance_of(
        dist.ProcessGroup if dist.is_available() else (),
        "a torch.distributed.ProcessGroup, or None",
    ),
    "noise_mechanism": instance_of(
        (str, CorrelatedNoise),
        '"gaussian", CorrelatedNoise(bands=8), or the name of a registered one',
    ),
    # noise and clipping
    "noise_multiplier": number("a finite number of 0 or more", lambda value: 0 <= value < math.inf),
    "clipping": Choice(lambda: CLIPPINGS),
    "clipping_function": Choice(
        known_clipping_functions,
        ", or call dp_clipping.register_clipping_function(name, fn, bound=..) first",
    ),
    "gamma": positive("a finite number above 0"),
    "loss_reduction": Choice(lambda: LOSS_REDUCTIONS),
    "expected_batch_size": number(
        "a finite number above 0: the samples that all ranks together expect in a step",
        lambda value: 1 / LARGEST <= value <= LARGEST,
    ),
    "checks": Choice(lambda: LEVELS),
    # the mode
    "grad_sample_mode": Choice(
        lambda: (*MODES, "none"), " (docs/from_opacus.md has those of Opacus)"
    ),
    "norm_reduction": Choice(lambda: NORM_REDUCTIONS),
    # kernels
    "norm_algorithm": Choice(lambda: NORM_ALGORITHMS),
    "memory_budget": whole("bytes, 0 or more, or None", least=0),
    "tile_size": Choice(lambda: TILE_SIZES, ", or None"),
    # sampling
    "sampling": Choice(lambda: SAMPLINGS),
    "sample_rate": number(
        "a probability above 0, at most 1: expected batch size / samples, both public",
        lambda value: 0 < value <= 1,
    ),
    "steps": whole("a whole number of 1 or more: the batches of an epoch"),
    **dict.fromkeys(("examples_per_unit", "examples_per_step", "epochs"), COUNT),
    "views": whole("a whole number of 1 or more: how many rows a batch has of each sample"),
    "max_batch_size": whole(
        "the most units that a batch of all ranks may have, a whole number of 1 or more"
    ),
    # the target of make_private_with_epsilon
    "target_epsilon": positive("a finite number above 0"),
    "target_delta": DELTA,
    "alphas": Argument(
        "a list of Rényi orders, numbers above 1, as alphas=[1.5, 2, 4, 8, 16, 32], or None",
        lambda value: isinstance(value, list | tuple) and all(map(is_number, value)),
        lambda value: len(value) > 0 and min(value) > 1,
    ),
    # of the engine's other methods
    "delta": DELTA,
    "loss": Argument(
        "a function loss(model, criterion, batch) of what the criterion returns, or None", callable
    ),
    "call": Argument("a function of a dict of metrics", callable),
    "unprotected": Argument(
        'names of metrics, as unprotected=["loss"]',
        lambda value: isinstance(value, str | list | tuple | set) and _are_names(value),
    ),
    "batches": whole("a whole number of batches, 0 or more", least=0),
    "every": whole("a whole number of steps, 1 or more"),
    # checkpoints
    "path": file("path", ", and no open one or bytes"),
    "key_path": file("key_path", ", or None"),
    "key_folder": Argument('the name of a folder, as key_folder="keys", or None', is_path),
    "weights": Choice(lambda: WEIGHTS),
    "noise_scheduler": SCHEDULER,
    "grad_clip_scheduler": SCHEDULER,
    "checkpoint_dict": instance_of(Mapping, "a dict of further entries"),
    "state_dict": _entries("what state_dict() of such a network returned"),
    "state": Argument(
        "what state_dict() of such an optimizer returned",
        lambda value: isinstance(value, Mapping),
        lambda value: "param_groups" in value and "state" in value,
    ),
    # the optimizer's methods
    "closure": Argument("a function without arguments that returns the loss, or None", callable),
    "hook": Argument("a function of the optimizer", callable),
    **dict.fromkeys(OPTIONS, _entries("a dict of arguments by name")),
    **dict.fromkeys(FLAGS, FLAG),
}


def check(name: str, value: Any) -> None:
    """Raises WrongType or ValueError, with what to give, for a value that `name` does not take.

    An argument that is not in the table takes any value.
    """
    if name in ARGUMENTS:
        ARGUMENTS[name].check(name, value)


def refuse_first(*refusals: tuple[Any, str]) -> None:
    """Raises ValueError with the first message whose condition holds."""
    for holds, message in refusals:
        if holds:
            raise ValueError(message)


def checked(call: str = "", /, **renamed: str) -> Callable[[Function], Function]:
    """Decorates a method: its arguments are looked up in the table, but for a default of None.

    Args:
        call: an example, which is shown where arguments are unknown, missing or not by name.
        renamed: arguments `old=new`; the old ones warn.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = signature.parameters
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.wraps(function)
        def of_checked(*args: Any, **kwargs: Any) -> Any:
            for old, new in renamed.items():
                if old in kwargs and new not in kwargs:
                    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                meant = _meant([one for one in kwargs if one not in parameters], parameters)
                raise TypeError(f"{name}: {error}{meant}{call and f': {call}'}") from None
            for argument, value in given.items():
                if value is not None or parameters[argument].default is not None:
                    check(argument, value)
            return function(*args, **kwargs)

        return cast(Function, of_checked)

    return decorate


def _meant(unknown: list[str], known: Iterable[str]) -> str:
    """Returns which known names are like these."""
    near = [name for one in unknown for name in difflib.get_close_matches(one, known, 1, 0.7)]
    return f" (did you mean {', '.join(near)}?)" if near else ""
