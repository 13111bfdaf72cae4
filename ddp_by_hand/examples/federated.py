"""Federated averaging in which a whole client is what is protected (DP-FedAvg).

    python -m ddp_by_hand.examples.federated

In a round every client takes part with probability q. It takes some steps on its own data from the
common parameters p, and sends the difference δ, which is clipped to norm C. The gradient of the
server's optimizer is the negative noisy sum over the expected number of clients (McMahan et al.
2018, arXiv 1710.06963; Reddi et al. 2021, arXiv 2003.00295).

A client is a sample whose loss is ⟨p, -δ⟩, so its gradient is exactly -δ. Clipping, sampling,
noise, account and checkpoints are those of `make_private`, unchanged.

Clients are classes of `functions_table`, which learn whether a method takes more than one argument.
They are simulated one after the other, and the server is trusted: it sees each δ.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from ddp_by_hand.examples import functions_table as table
from ddp_by_hand.measure.command_line import bad_input, check_file
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import PrivacyEngine


# fmt: off
@dataclass(frozen=True)
class Options:
    clients: int = option(1500, "clients; one of 10 is held out", metavar="N", check=positive)
    rounds: int = option(40, "rounds", metavar="N", check=positive)
    expected: int = option(128, "clients of a round, on average", metavar="N", check=positive)
    local_steps: int = option(5, "steps of a client", metavar="N", check=positive)
    lr: float = option(1.0, "learning rate of a client", metavar="R", check=positive)
    server_lr: float = option(2.0, "learning rate of the server", metavar="R", check=positive)
    clip: float = option(1.0, "C, to which δ of a client is clipped", metavar="C", check=positive)
    epsilon: float = option(8.0, "what all rounds may spend", metavar="E", check=positive)
    delta: float = option(1e-4, "δ of the guarantee", metavar="D", check=positive)
    checkpoint: Path = option(Path("results_federated/round.pt"), "written after each round")
    resume: bool = option(False, "continue from --checkpoint (default: begin)")
# fmt: on

Update = Callable[[int, Tensor], Tensor]


def run_round(server: Any, optimizer: Any, criterion: Any, clients: Tensor, update: Update) -> None:
    """Takes one step of the server; `update(client, p)` returns the δ of a client."""
    p = server.weight.detach().flatten()
    negative = p.new_zeros(len(clients), len(p))  # a round without clients is a step of noise
    for row, client in zip(negative, clients.tolist(), strict=True):
        row.sub_(update(client, p))
    criterion(server(negative)).backward()  # ⟨p, -δ⟩ of each
    optimizer.step()
    optimizer.zero_grad()


def train_locally(network: nn.Module, p: Tensor, data: Any, options: Options) -> Tensor:
    """Returns δ: where a client's own steps end, less where they begin."""
    vector_to_parameters(p.clone(), network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr)
    for _ in range(options.local_steps):
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(network(data[0]), data[1]).backward()
        optimizer.step()
    return parameters_to_vector(network.parameters()).detach() - p


@program("federated", Options)
@bad_input()
def main(options: Options) -> int:
    """Trains, and prints ε."""
    check_file("--checkpoint", options.checkpoint)
    parts: tuple[list, list] = [], []
    for name, rows in table.read_entities(options.clients).items():
        parts[table.is_held_out(name, 10)].append(table.to_letters(rows))
    clients, held_out = parts
    torch.manual_seed(0)  # of the initial parameters, not of noise and clients
    network, engine = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1)), PrivacyEngine()
    start = parameters_to_vector(network.parameters()).detach()
    server = nn.Linear(len(start), 1, bias=False)
    server.load_state_dict({"weight": start[None]})
    rate = options.expected / (0.9 * options.clients)
    server, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=server, optimizer=torch.optim.SGD(server.parameters(), lr=options.server_lr),
        criterion=torch.flatten,
        data_loader=DataLoader(range(len(clients)), batch_size=options.expected),
        sample_rate=rate, steps=options.rounds, expected_batch_size=options.expected,
        target_epsilon=options.epsilon, target_delta=options.delta, max_grad_norm=options.clip,
        wrap_model=False,
    )  # fmt: skip
    state: dict[str, Any] = {"module": server, "optimizer": optimizer, "data_loader": loader}
    if options.resume:
        engine.load_checkpoint(path=options.checkpoint, **state)
    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    for batch in loader if optimizer.steps < options.rounds else ():
        run_round(
            server, optimizer, criterion, batch,
            lambda client, p: train_locally(network, p, clients[client], options),
        )  # fmt: skip
        engine.save_checkpoint(path=options.checkpoint, **state)
        spent = engine.get_epsilon(options.delta)
        print(f"round {optimizer.steps:3d} of {options.rounds}   epsilon {spent:.3f}", flush=True)
    vector_to_parameters(server.weight.detach().flatten(), network.parameters())
    x, y = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    right = ((network(x) > 0) == (y > 0)).float().mean()
    print(table.report(engine, options.delta, rate, options.rounds))
    print("what it calls an example, an item of the loader, is a client with all of its data")
    print(f"not covered by epsilon: {right:.1%} right on held-out clients; a guess {y.mean():.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
