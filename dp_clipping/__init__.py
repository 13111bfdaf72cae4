"""Differentially private training: DP-SGD (Abadi et al. 2016) at nearly the price of training.

A private step calls, from the top down:

    engine        `PrivacyEngine`: what a user calls
    build         builds what `make_private` returns
    model, criterion, optimizer     which are these, and a loader
    cuda_graph    a whole step as one CUDA graph
    losses/       losses of a batch, one per sample, also where the network computes them
    arguments/    the arguments of `make_private`, checked once
    kinds, validation, modes     types, networks and modes that they may have
    files, table  files written whole or not at all; aligned text tables
    torch_compat  interfaces of PyTorch that have no public name
    step/         forward, backward, norms, clipped sums, the gradient buffer
    guard/        refuses networks, losses and state with which samples depend on each other
    capture/      which layers a network has, and where the samples are in them
    layers/       per kind of layer: what a use leaves, its norm, its clipped sum
    planning/     which algorithm a linear layer takes, by predicted cost
    clipping/     norms, coefficients and their statistics: the definition of clipping
    kernels/      Triton kernels, one idea per file, each beside its reference implementation
    noise/        Gaussian noise from addressed streams, keys, the adaptive threshold
    sampling/     Poisson batches, physical microbatches, and what a step may use of them
    distributed/  sharded models: placement, norms and clipped sums over ranks
    accounting/   the account of every step, the noise for a target ε, the privacy statement
    runs/         what the engine keeps of each `make_private`: its account, its checkpoints
    checkpoint/   saving and loading
    profiling/    the profiling switch
    integrations/ training loops of other libraries: `PrivateTrainer` for Hugging Face
    audit/        `PrivacyEngine.audit`: canaries, and the ε that guesses about them refute
    verification/ `PrivacyEngine.check`: a private step beside one backward per sample
    trials/       what checks share that run something again and compare
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_clipping.capture.layer_kinds import register_layer
    from dp_clipping.clipping.coefficients import register_clipping_function
    from dp_clipping.engine import PrivacyEngine
    from dp_clipping.layers.registered.registry import LinearProduct
    from dp_clipping.modes import MODES
    from dp_clipping.noise.correlated import CorrelatedNoise
    from dp_clipping.noise.mechanisms import register_noise_mechanism
    from dp_clipping.sampling.memory_manager import BatchMemoryManager
    from dp_clipping.verification.contributions import check_clipping_function

__all__ = [
    "MODES", "BatchMemoryManager", "CorrelatedNoise", "LinearProduct", "PrivacyEngine",
    "check_clipping_function", "register_clipping_function", "register_layer",
    "register_noise_mechanism",
]  # fmt: skip


_HOMES = {
    "MODES": "dp_clipping.modes",
    "BatchMemoryManager": "dp_clipping.sampling.memory_manager",
    "CorrelatedNoise": "dp_clipping.noise.correlated",
    "LinearProduct": "dp_clipping.layers.registered.registry",
    "PrivacyEngine": "dp_clipping.engine",
    "check_clipping_function": "dp_clipping.verification.contributions",
    "register_clipping_function": "dp_clipping.clipping.coefficients",
    "register_noise_mechanism": "dp_clipping.noise.mechanisms",
    "register_layer": "dp_clipping.capture.layer_kinds",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import dp_clipping` itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dp_clipping' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found
