"""Audits private training of a small network, right or broken on purpose.

    python -m ddp_by_hand.examples.audit                     # nothing is found
    python -m ddp_by_hand.examples.audit --fault half-noise  # exit status 1: the account is refuted

Two attacks on copies of the network: `engine.audit` trains with canaries and bounds ε from below,
`engine.record_sums` takes one step on data with and without each of some samples.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.audit_faults import FAULTS
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import option, program
from dp_clipping import PrivacyEngine

DELTA = 1e-5


@dataclass(frozen=True)
class Options:
    fault: str | None = option(None, "what is broken on purpose", choices=sorted(FAULTS))
    canaries: int = option(10000, "more of them refute more")
    noise_multiplier: float = option(3.0, "σ, as stated")
    sample_rate: float = option(0.5, "q")
    steps: int = option(8, "of the audited run")
    confidence: float = option(0.95, "of the bounds")
    seed: int | None = option(None, "fixes noise and canaries (default: the system's)")
    skip: str | None = option(None, "one of both attacks", choices=("audit", "record_sums"))


@program("audit", Options)
@bad_input()
def main(options: Options) -> int:
    """Prints both reports; returns 1 if one of them has found a fault."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(64, 20), torch.randint(4, (64,)))
    given = {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=16),
        "criterion": nn.CrossEntropyLoss(),
        "noise_multiplier": options.noise_multiplier,
        "max_grad_norm": 1.0,
        "grad_sample_mode": "bookkeeping",
    }
    if options.seed is not None:
        given["noise_generator"] = torch.Generator().manual_seed(options.seed)
    engine, reports = PrivacyEngine(accountant="prv"), []
    with FAULTS[options.fault][0]() if options.fault else nullcontext():
        if options.skip != "audit":
            reports.append(
                engine.audit(
                    **given,
                    canaries=options.canaries,
                    sample_rate=options.sample_rate,
                    steps=options.steps,
                    delta=DELTA,
                    confidence=options.confidence,
                )
            )
            print(f"engine.audit\n\n{reports[-1]}\n")
        if options.skip != "record_sums":
            reports.append(engine.record_sums(**given))
            print(f"engine.record_sums\n\n{reports[-1]}")
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
