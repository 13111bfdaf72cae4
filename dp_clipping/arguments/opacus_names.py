"""Refuses names of Opacus that differ here, each with the call that takes its place.

docs/from_opacus.md has all of them in tables.
"""

import dis
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

CALL = "model, optimizer, criterion, loader = engine.make_private(.., criterion=criterion)"
ADAPTIVE = (
    "give adaptive_threshold=AdaptiveThreshold(max_grad_norm, expected_batch_size=.., "
    "quantile=0.5, learning_rate=0.2), from dp_clipping.noise.adaptive_threshold"
)
CLIPPINGS = {"adaptive": ADAPTIVE}
ARGUMENTS = {
    name: ADAPTIVE
    for name in (
        "target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound",
        "unclipped_num_std",
    )
}  # fmt: skip
"""Arguments of `make_private` that Opacus passes to its optimizer."""
TARGETS = {
    name: f"make_private has no {name}: call engine.make_private_with_epsilon(target_epsilon=8.0, "
    "target_delta=1e-5, epochs=3, ..), or give make_private noise_multiplier=1.0"
    for name in ("target_epsilon", "target_delta", "epochs")
}
"""Arguments of `make_private_with_epsilon`, in Opacus and here."""

_PER_SAMPLE = (
    'leave it out, or give "per_sample", which materialises per-sample gradients too; '
    f"make_private then returns four values: {CALL}"
)
_SHARDED = 'give "ghost" or leave it out: how the module is sharded is seen from the module'
MODES = {
    "hooks": _PER_SAMPLE,
    "functorch": _PER_SAMPLE,
    "ew": _PER_SAMPLE,
    "ghost_fsdp": _SHARDED,
    "ghost_tp": _SHARDED,
    "no_op": 'give "no_dp" to train without privacy; per-sample gradients of your own making are '
    "not taken",
}

_NORMS = "model.per_sample_gradient_norms has the norms, and no gradient of a sample is kept"
_HOOKS = "model.to_standard_module() returns the network as it was before make_private"
_ALWAYS_ACCUMULATES = (
    "BatchMemoryManager splits a Poisson batch, and a second one before optimizer.step() is "
    "refused in any case"
)
MODEL = {
    "set_grad_sample_to_none": _NORMS,
    "del_grad_sample": _NORMS,
    "get_norm_sample": _NORMS,
    "get_clipping_coef": "model.norm_statistics() has the clipped fraction",
    "forbid_grad_accumulation": _ALWAYS_ACCUMULATES,
    "allow_grad_accumulation": _ALWAYS_ACCUMULATES,
    "remove_hooks": _HOOKS,
    "cleanup": _HOOKS,
    "add_hooks": "give a network to engine.make_private(module=..) again",
    "disable_hooks": "model.eval() runs the network alone",
    "enable_hooks": "model.train() makes its calls private steps again",
    "is_supported": "engine.is_compatible(module=network) checks a whole network",
    "validate": "call engine.validate(module=network)",
    "iterate_submodules": "use network.modules()",
    "GRAD_SAMPLERS": "a layer without arithmetic of its own runs under torch.vmap, unregistered",
    "NORM_SAMPLERS": "a layer without arithmetic of its own runs under torch.vmap, unregistered",
    "capture_activations_hook": "backward() of the loss does it",
    "capture_backprops_hook": "backward() of the loss does it",
    "rearrange_grad_samples": "backward() of the loss does it",
    "log_module_gradient_sample_mode": "print(model.plan_table()) shows the plan of each layer",
    "set_pattern_param_sample_norm_sum": "norms of tensor-parallel layers are added by themselves",
}
_BACKWARD = "backward() of the loss clips and accumulates"
_PRE_STEP = "call optimizer.pre_step(), after which .grad has its noise and is divided"
OPTIMIZER = {
    "params": 'use [p for group in optimizer.param_groups for p in group["params"]]',
    "grad_samples": _NORMS,
    "clip_and_accumulate": _BACKWARD,
    "accumulate": _BACKWARD,
    "add_noise": _PRE_STEP,
    "scale_grad": _PRE_STEP,
    "reduce_gradients": _PRE_STEP,
    "update_max_grad_norm": ADAPTIVE,
}


def described(name: str, instead: str) -> str:
    """Returns the message for a name of Opacus."""
    return f"{name} is a name of Opacus that is not here: {instead}"


def refuse(argument: str, value: Any, known: dict[str, str]) -> None:
    """Raises ValueError if only Opacus has this value of the argument."""
    if isinstance(value, str) and value in known:
        raise ValueError(f"{argument} {value!r} is one of Opacus's: {known[value]}")


def refuse_opacus(module: Any, optimizer: Any, criterion: Any, loader: Any) -> None:
    """Raises ValueError for objects that Opacus's `make_private` has returned or wrapped."""
    inner = module.modules() if isinstance(module, nn.Module) else ()
    if any(_is(m, "AbstractGradSampleModule") for m in inner):
        raise ValueError(
            "module is a GradSampleModule of Opacus: give the network, which its "
            "module.to_standard_module() returns"
        )
    if getattr(module, "autograd_grad_sample_hooks", None):
        raise ValueError(
            "module has hooks of Opacus's make_private(.., wrap_model=False): call cleanup() of "
            "what that returned, and give the network then"
        )
    if _is(optimizer, "DPOptimizer"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} of Opacus: give "
            "optimizer.original_optimizer"
        )
    if _is(criterion, "DPLossFastGradientClipping"):
        raise ValueError(
            f"criterion is a {type(criterion).__name__} of Opacus: give criterion.criterion"
        )
    if _is(loader, "DPDataLoader"):
        raise ValueError(
            "data_loader is a DPDataLoader of Opacus, which does Poisson sampling already: give "
            "the DataLoader that it was made from"
        )


def _is(value: Any, kind: str) -> bool:
    """Returns whether a value is an instance of Opacus's class `kind`, without importing Opacus."""
    return any(
        c.__name__ == kind and c.__module__.startswith("opacus.") for c in type(value).__mro__
    )


class FourValues(tuple):
    """The result of `make_private`.

    Unpacking it as three values, as Opacus's, raises an error that says what to do.
    """

    def __iter__(self) -> Iterator[Any]:
        caller = inspect.currentframe().f_back
        code, at = caller.f_code.co_code, caller.f_lasti
        if code[at : at + 2] == bytes([dis.opmap["UNPACK_SEQUENCE"], 3]):
            raise ValueError(
                "make_private returns four values in every mode, as Opacus does in mode ghost, and "
                f"loss.backward() is that of the returned criterion: {CALL}"
            )
        return super().__iter__()
