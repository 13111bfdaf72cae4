"""Copies of a user's network and optimizer, with which an audit makes private runs of its own."""

import copy
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.arguments.given import check_optimizer
from dp_clipping.arguments.sampled import Sampled
from dp_clipping.distributed.detect import sharding_of
from dp_clipping.kinds import instance_of
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.validation import replicas

REFUSED = {
    "cuda_graph": "leave it out: `.grad` is read after each step",
    "fused_step": "leave it out: `.grad` is read after each step",
    "data_parallel_group": "leave it out: an audit runs in one process",
    "examples_per_step": "leave it out, and give examples_per_unit: runs without a unit number the "
    "others anew, which then give other examples",
}


@dataclass(frozen=True)
class Audited:
    """Holds what the user gave to an audit, and copies it, so that no run changes it.

    Attributes:
        arguments: further arguments of `make_private`.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    loader: DataLoader
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        instance_of(nn.Module, "a torch.nn.Module, the network").check("module", self.module)
        Sampled.of({}, data_loader=self.loader)
        for name, instead in REFUSED.items():
            if self.arguments.get(name):
                raise ValueError(f"{name} is not for an audit: {instead}")
        if not self.arguments.get("poisson_sampling", True):
            raise ValueError(
                "poisson_sampling=False has no stated epsilon that an audit could refute: leave it "
                "out"
            )
        if self.arguments.get("sampling", "poisson") != "poisson":
            raise ValueError(
                f"sampling={self.arguments['sampling']!r} is not for an audit: its attacks are on "
                'Poisson batches: audit sampling="poisson", the default'
            )
        if self.arguments.get("grad_sample_mode") == "no_dp":
            raise ValueError(
                'grad_sample_mode="no_dp" clips nothing and adds no noise: audit the mode that '
                'trains privately, as grad_sample_mode="flash_bookkeeping"'
            )
        is_wrapped = hasattr(self.module, "gradient_ready") or isinstance(self.module, replicas())
        if is_wrapped or sharding_of(self.module) is not None:
            raise ValueError(
                "module is wrapped or sharded, and an audit runs on a copy in one process: give "
                "the network before ddp.wrap(..), fully_shard(..) or parallelize_module(..), and "
                "an optimizer over its parameters"
            )
        check_optimizer(self.optimizer, self.module)

    @property
    def batch_first(self) -> bool:
        return self.arguments.get("batch_first", True)

    @cached_property
    def sampled(self) -> Sampled:
        """Returns how `make_private` would sample these data."""
        return Sampled.of(self.arguments, data_loader=self.loader)

    def units(self) -> list[Any]:
        """Returns the unit of privacy of each example of the data set."""
        units, ids = self.sampled.units, self.arguments.get("unit_ids")
        if units is None or ids is None:
            examples = len(self.loader.dataset)  # type: ignore[arg-type]
            return [index // self.sampled.examples_per_unit for index in range(examples)]
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)

    def expected_batch_size(self) -> float:
        given = self.arguments.get("expected_batch_size")
        return self.sampled.expected_units(1) if given is None else given

    def copied(self) -> tuple[nn.Module, Optimizer, Any]:
        """Returns copies of module, optimizer and criterion that share nothing with these."""
        try:
            copied = copy.deepcopy((self.module, self.optimizer, self.criterion))
        except Exception as error:
            raise ValueError(
                "an audit trains a copy, and copy.deepcopy((module, optimizer, criterion)) fails: "
                f"{error}"
            ) from error
        module, optimizer, criterion = copied
        optimizer.zero_grad()
        return module.train(), optimizer, criterion

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Enters a context after which all random states are as before. Its warnings are hidden.

        They are about the private run of a copy, with a key of its own.
        """
        with ExitStack() as stack:
            for device in {p.device for p in self.module.parameters()}:
                stack.enter_context(same_randomness(device=device))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            yield

    def seeds(self) -> tuple[torch.Generator, torch.Generator]:
        """Returns generators for the keys of a run, and for all else: independent of each other."""
        given = self.arguments.get("noise_generator")
        seed = secrets.randbits(62) if given is None else given.initial_seed() % 2**62
        return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed ^ 2**62 - 1)
