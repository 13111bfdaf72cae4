"""Audits private training of a small network, right or broken on purpose.

    python -m ddp_by_hand.examples.audit                     # nothing is found
    python -m ddp_by_hand.examples.audit --fault half-noise  # exit status 1: the account is refuted

Two attacks on copies of the network: `engine.audit` trains with canaries and bounds ε from below,
`engine.record_sums` takes one step on data with and without each of some samples.
"""

import argparse
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.audit_faults import FAULTS
from dp_clipping import PrivacyEngine

DELTA = 1e-5


def parser() -> argparse.ArgumentParser:
    """Returns the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--fault", choices=sorted(FAULTS), help="what is broken on purpose")
    options.add_argument("--canaries", type=int, default=10000, help="more of them refute more")
    options.add_argument("--noise-multiplier", type=float, default=3.0, help="σ, as stated")
    options.add_argument("--sample-rate", type=float, default=0.5, help="q")
    options.add_argument("--steps", type=int, default=8, help="of the audited run")
    options.add_argument("--confidence", type=float, default=0.95, help="of the bounds")
    options.add_argument("--seed", type=int, help="fixes noise and canaries; default: the system's")
    options.add_argument("--skip", choices=("audit", "record_sums"), help="one of both attacks")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints both reports; returns 1 if one of them has found a fault."""
    options = parser().parse_args(arguments)
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
