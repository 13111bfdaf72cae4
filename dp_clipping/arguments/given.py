"""Refuses objects that `make_private` cannot take: used already, or not made for each other."""

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold

NETWORK = (
    "give the network that optimizer.model.to_standard_module() returns, called on the optimizer "
    "of the earlier make_private, or a new network"
)
USED = {
    "PrivateModel": NETWORK,
    "AbstractGradSampleModule": "give the network, which its module.to_standard_module() returns",
    **dict.fromkeys(("PrivateOptimizer", "DPOptimizer"), "give optimizer.original_optimizer"),
    "AcceleratedOptimizer": "give the optimizer itself, as what make_private returns needs no "
    "accelerator.prepare(), whose steps are skipped while it accumulates",
    **dict.fromkeys(
        ("PrivateCriterion", "DPLossFastGradientClipping"), "give criterion.criterion"
    ),
    **dict.fromkeys(
        ("PoissonLoader", "BatchMemoryManager", "DPDataLoader"),
        "it does Poisson sampling or is split already, give the DataLoader that it was made from",
    ),
}  # fmt: skip
"""Class -> what to give. Classes are found by name, and no library is imported for them."""
LIBRARIES = ("dp_clipping.", "opacus.", "accelerate.")


def refuse_used(**given: Any) -> None:
    """Raises ValueError for what dp_clipping, Opacus or accelerate has returned or wrapped.

    Args:
        given: `module`, `optimizer`, `criterion` and `data_loader` of `make_private`.
    """
    module = given["module"]
    inner = list(module.modules()) if isinstance(module, nn.Module) else []
    for name, value in [*(("module", one) for one in inner), *given.items()]:
        for kind in type(value).__mro__:
            if kind.__name__ in USED and kind.__module__.startswith(LIBRARIES):
                already = f"is private or prepared already ({kind.__name__})"
                raise ValueError(f"{name} {already}: {USED[kind.__name__]}")
    if any({"_private", "refuse_wrapper"} & vars(one).keys() for one in inner):
        raise ValueError(f"module is private or prepared already: {NETWORK}")
    if getattr(module, "autograd_grad_sample_hooks", None):
        raise ValueError(
            "module has hooks of Opacus's make_private(.., wrap_model=False): call cleanup() of "
            "what that returned, and give the network then"
        )


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises ValueError unless it is an optimizer of the module's parameters."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and each time "
            "would need noise and ε of its own: give an optimizer whose step() takes no closure, "
            "such as torch.optim.SGD or AdamW"
        )
    own = set(module.parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held <= own:
        raise ValueError(
            "the optimizer holds parameters that are not the module's (of another network, or from "
            "before the module was wrapped, sharded or moved): build it last, as "
            f"{type(optimizer).__name__}(module.parameters(), ..)"
        )
    missing = [n for n, p in module.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"trainable but not in the optimizer: {', '.join(missing[:5])}; freeze them with "
            "requires_grad_(False) or give them to the optimizer"
        )
    if hasattr(module, "gradient_pieces") and getattr(optimizer, "model", None) is not module:
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer steps whole parameters, and with {type(module).__name__} each rank has the "
            f"sums of its own slices only: build it as module.make_optimizer({name}, lr=..)"
        )


def check_adaptive(
    adaptive: AdaptiveThreshold, clip_norms: list[float], noise_multiplier: float,
    expected_batch_size: float, is_private: bool,
) -> None:  # fmt: skip
    """Raises ValueError for an adaptive threshold that was not made for this run."""
    if not is_private:
        raise ValueError("adaptive_threshold is for private modes: no_dp clips nothing")
    if adaptive.clip_norms != clip_norms:
        raise ValueError(
            f"the adaptive threshold starts at {adaptive.clip_norms[:4]} and max_grad_norm gives "
            f"{clip_norms[:4]} for {len(clip_norms)} clipping groups: build it from the same "
            "numbers"
        )
    if adaptive.expected_batch_size != expected_batch_size:
        raise ValueError(
            f"the adaptive threshold's expected_batch_size is {adaptive.expected_batch_size:g} and "
            f"the run's {expected_batch_size:g}: both must be the same public constant"
        )
    adaptive.gradient_noise_multiplier(noise_multiplier)
