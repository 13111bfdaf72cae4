"""The names of a training step's phases: the same words in code, trace, summary and picture."""

import torch

PARTS_OF_BACKWARD = ("norm_pass", "clip_coefficients", "weighted_sum")  # of a private step
PARTS_OF_SHARDED = ("norm_all_reduce", "reduce_scatter")  # inside of these, and of `gradient_sync`
PHASES = (
    "forward_pass",
    "backward_pass",
    *PARTS_OF_BACKWARD,
    *PARTS_OF_SHARDED,
    "gradient_sync",
    "noise",
    "gradient_clipping_warmup",
    "optimizer_step",
    "lr_scheduling",
)
EPOCH_PREFIX = "epoch_"
LAYER_PREFIXES = ("norm/", "sum/")  # of one layer's part of a private backward
COMMUNICATION_PREFIX = "communication:"
CONFIGURATION = "configuration"  # a trace's entry with what `profile` was told about the run
ACCUMULATION = "torch::autograd::AccumulateGrad"  # autograd's node of one gradient
BOOT = "boot_id"  # a trace's entry that says on which host's clock it was recorded


def phase(name: str) -> torch.profiler.record_function:
    """Labels a part of the step in a trace: `with phase("forward_pass"): ...`."""
    return torch.profiler.record_function(name)
