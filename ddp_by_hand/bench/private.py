"""Private training of an implementation, through the public interface, `PrivacyEngine`.

The batches are the benchmark's own: the same sequences in every mode, of fixed size. So the timed
step is one of DP-SGD, and no ε is stated for it.
"""

import logging
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_by_hand.bench.parts import Batch, StepParts, clipping_of
from ddp_by_hand.bench.settings import Settings, mode_and_algorithm
from dp_clipping import PrivacyEngine

MIB = 1 << 20


def private_parts(
    clipping: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    data_ranks: int,
    noise_multiplier: float | None = None,
) -> StepParts:
    """Builds the parts of a private step.

    Args:
        clipping: one of `dp_clipping.MODES`, or a fused one with norm algorithm: `flash:width`.
        model: a network, sharded or not, or an implementation's wrapper around it, which is set
            to sums.
        optimizer: over its parameters.
        settings: for clipping and noise.
        data_ranks: whose batches are one global batch: the divisor is its size.
        noise_multiplier: overrides that of the settings.
    """
    if dist.get_rank() > 0:
        logging.getLogger("dp_clipping").setLevel(logging.ERROR)  # rank 0 says it
    privacy, (mode, norm_algorithm) = settings.privacy, mode_and_algorithm(clipping)
    budget = privacy.memory_budget_mb
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="poisson_sampling=False")
        # The gate's reference is each rank's own, on the whole batch.
        warnings.filterwarnings("ignore", message=r"\d+ ranks, and module is neither wrapped")
        private, private_optimizer, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(range(settings.num_steps), batch_size=None),  # only its length
            noise_multiplier=(
                privacy.noise_multiplier if noise_multiplier is None else noise_multiplier
            ),
            max_grad_norm=privacy.max_grad_norm,
            poisson_sampling=False,
            clipping=privacy.clipping_style,
            grad_sample_mode=mode,
            clipping_function=privacy.clipping_function,
            expected_batch_size=data_ranks * settings.batch_size,
            norm_algorithm=norm_algorithm,
            memory_budget=None if budget is None else int(budget * MIB),
            tile_size=privacy.tile_size,
            norm_reduction=privacy.norm_reduction,
        )
    private.skip_checks()  # they would be in some of the few steps that are timed

    def forward_loss(batch: Batch) -> Tensor:
        """Returns one loss per sequence; see `lm.model.forward_loss`."""
        inputs, targets = batch
        logits = private(inputs)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return criterion(logits.flatten(0, 1).to(wide), targets.flatten(), shape=logits.shape)

    return StepParts(
        model=private,
        optimizer=private_optimizer,
        forward_loss=forward_loss,
        finish=private.finish_synchronization,
        more_phases={"noise": private_optimizer.pre_step},
        clip_gradients=clipping_of(model),
    )
