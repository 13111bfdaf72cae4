"""Distributed data parallel, built by hand, from the obvious to the fast.

The steps, in the order of reading:

1. synchronous.py: all-reduce after backward; begins with the whole idea in 15 lines
2. individual.py, with base.py and schedule.py: a hook per gradient starts its all-reduce
3. individual_v2.py, with buckets.py: coalesced groups
4. bucketed.py: flat buckets whose slices are the gradients
5. copy_engine/, which begins with variant.py: buckets that the copy engines exchange

The second part, sharded/: what every rank holds in common is divided among the ranks.

The third, diloco.py: ranks train apart, and take one step together in many.

none.py is the floor of every comparison. PyTorch's own are torch_ddp.py and
torch_fsdp.py.

Skip at the first reading: internals/ (robustness, one object per concern), torch_compat.py (PyTorch
interfaces without a public name), and buckets.py before step 3.
"""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp.base import DataParallel
from ddp.bucketed import BucketedDDP
from ddp.copy_engine import CopyEngineDDP, Unavailable
from ddp.diloco import DilocoDDP
from ddp.individual import IndividualDDP
from ddp.individual_v2 import IndividualV2DDP
from ddp.internals.ranks import group_or_default, told_by_all
from ddp.none import NoCommunication
from ddp.sharded.fsdp import HandBuiltFSDP
from ddp.sharded.zero1 import Zero1DDP
from ddp.sharded.zero2 import Zero2DDP
from ddp.synchronous import SynchronousDDP
from ddp.torch_ddp import TorchDDP, TorchZero1, TunedTorchDDP
from ddp.torch_fsdp import TorchFSDP

__all__ = ["IMPLEMENTATIONS", "DataParallel", "Unavailable", "implementation", "wrap"]

IMPLEMENTATIONS: dict[str, type[nn.Module]] = {
    "none": NoCommunication,
    "ddp": SynchronousDDP,
    "ddp_individual": IndividualDDP,
    "ddp_individual_v2": IndividualV2DDP,
    "ddp_bucketed": BucketedDDP,
    "ddp_copy_engine": CopyEngineDDP,
    "zero1": Zero1DDP,
    "zero2": Zero2DDP,
    "fsdp": HandBuiltFSDP,
    "diloco": DilocoDDP,
    "torch_ddp": TorchDDP,
    "torch_ddp_tuned": TunedTorchDDP,
    "torch_zero1": TorchZero1,
    "torch_fsdp": TorchFSDP,
}


def wrap(name: str, module: nn.Module, **options: Any) -> nn.Module:
    """Makes `module` data parallel.

    Args:
        name: a key of `IMPLEMENTATIONS`, or `path/to/file.py:ClassName`.
        module: the network, on its device already.
        options: `reduce`, `process_group`, `find_unused_parameters`; `bucket_size_mb` where
            gradients are batched, None for one bucket per dtype; further ones of the variant.

    Raises:
        ValueError: for an unknown name, or ranks with different models or options.
        TypeError: for an option that this variant does not have, and what is no module.
        RuntimeError: for a network with nothing to train or with lazy parameters, one that shares
            a trainable parameter with another wrapped network, and a private model.
        Unavailable: where the variant cannot work on this machine; the message says why.
    """
    cls = implementation(name)
    unknown = [option for option in options if option not in options_of(cls)]
    if unknown:
        known = ", ".join(options_of(cls)) or "none"
        raise TypeError(f"{name} has no option {', '.join(unknown)}; it takes {known}")
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(module)} is no nn.Module: give the network, wrap({name!r}, net)")
    for inner in module.modules():
        refuse: Any = getattr(inner, "refuse_wrapper", None)  # private models of dp_clipping do
        if refuse is not None:
            refuse(cls.__name__)
    if name in IMPLEMENTATIONS:
        group = group_or_default(options.get("process_group"))
        _agree_on({"variant": name, **options, "process_group": None}, group)
    return cls(module, **options)


def _agree_on(options: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks if the options of one are not those of rank 0."""
    shown = {  # 1.0 is 1
        n: sorted(map(repr, x)) if isinstance(x, set) else repr(x).removesuffix(".0")
        for n, x in options.items()
    }
    first, *others = told_by_all(shown, group)
    for rank, theirs in enumerate(others, 1):
        for name in sorted(first.keys() | theirs):
            here, there = (of.get(name, "(its default)") for of in (first, theirs))
            if here != there:
                what = f"{name}={here} on rank 0, {name}={there} on rank {rank}"
                raise ValueError(f"the ranks have different options: {what}")


def implementation(name: str) -> type[nn.Module]:
    """Returns the class behind a name or behind `path/to/file.py:ClassName`.

    Raises:
        ValueError: if there is no such variant, file or class, or the class lacks
            `finish_gradient_synchronization`.
    """
    if name in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[name]
    path, separator, class_name = name.rpartition(":")
    if not separator:
        raise ValueError(
            f"implementation {name!r} is unknown: choose from {', '.join(IMPLEMENTATIONS)}, "
            "or give path/to/file.py:ClassName; separate several with spaces"
        )
    return _load_class(Path(path), class_name)


def options_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the keyword options that a variant takes: its `options`, or its constructor's."""
    if hasattr(cls, "options"):
        return cls.options
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


# Plug-ins by file and what is in it: a class is the same one at every call, for pickle.
_loaded: dict[tuple[Path, bytes], ModuleType] = {}


def _load_class(path: Path, class_name: str) -> type[nn.Module]:
    def refusal(why: str) -> ValueError:
        return ValueError(f"implementation {path}:{class_name}: {why}")

    if not path.is_file():
        raise refusal(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise refusal(f"{path} is not a Python file")
    version = path.resolve(), path.read_bytes()
    module = _loaded.get(version) or importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        if version not in _loaded:
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise refusal(f"{path} fails: {error!r}") from error
    _loaded[version] = module
    cls = getattr(module, class_name, None)
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise refusal(f"{path} has no nn.Module of that name")
    if not callable(getattr(cls, "finish_gradient_synchronization", None)):
        raise refusal("it needs a method finish_gradient_synchronization")
    return cls
