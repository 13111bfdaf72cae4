"""A text classifier over an embedding, as Opacus's tutorials make one private in ghost mode.

    python -m examples.opacus_text_classifier
    python -m examples.opacus_text_classifier --engine opacus

Headlines of four topics are made here from small vocabularies, with words that all topics share.
They have different lengths, so the collate function pads, and the padding must not count.
"""

import argparse
import random
import sys

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from examples.engines import engine_classes, parser, run

TOPICS = (
    "minister treaty election border summit envoy parliament ceasefire",
    "striker season coach final injury transfer league penalty",
    "shares profit merger bank inflation market deal quarter",
    "telescope vaccine software orbit protein satellite battery gene",
)
COMMON = "the a of in after new says over for with as on"
WORDS = ["<pad>", *f"{COMMON} {' '.join(TOPICS)}".split()]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
PAD = 0


class Network(nn.Module):
    """words [B, T] -> logits [B, 4], over the mean of the words that are there."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, words: Tensor) -> Tensor:
        there = (words != PAD).unsqueeze(-1)
        mean = (self.embedding(words) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.head(self.norm(torch.relu(self.hidden(mean))))


def make_headlines(count: int) -> list[tuple[list[str], int]]:
    """Words and topic of each headline."""
    headlines = []
    for _ in range(count):
        topic = random.randrange(len(TOPICS))
        own = random.choices(TOPICS[topic].split(), k=random.randint(1, 4))
        words = own + random.choices(COMMON.split(), k=random.randint(2, 8))
        random.shuffle(words)
        headlines.append((words, topic))
    return headlines


def collate(headlines: list[tuple[list[str], int]]) -> tuple[Tensor, Tensor]:
    """Numbers [B, T], padded on the right, and topics [B]."""
    rows = [torch.tensor([NUMBERS[word] for word in words]) for words, _ in headlines]
    topics = torch.tensor([topic for _, topic in headlines])
    return pad_sequence(rows, batch_first=True, padding_value=PAD), topics


def train(options: argparse.Namespace) -> dict[str, float]:
    """First and last epoch's mean loss, which ε does not cover, and ε."""
    PrivacyEngine, _ = engine_classes(options.engine)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    loader = DataLoader(make_headlines(1024), batch_size=options.batch_size, collate_fn=collate)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=network,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=options.max_grad_norm,
        grad_sample_mode="ghost",
    )
    model.train()
    means = []
    for epoch in range(options.epochs):
        losses = []
        for words, topics in loader:
            optimizer.zero_grad()
            loss = criterion(model(words), topics)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        print(
            f"epoch {epoch + 1}: epsilon {engine.get_epsilon(options.delta):.2f} at delta "
            f"{options.delta:g}; loss {means[-1]:.3f} (not covered by epsilon)"
        )
    return {
        "first": means[0], "last": means[-1], "epsilon": engine.get_epsilon(options.delta),
        "noise_multiplier": float(optimizer.noise_multiplier),
    }  # fmt: skip


def options() -> argparse.ArgumentParser:
    made = parser("opacus_text_classifier", "Classify headlines privately.")
    made.add_argument(
        "--noise-multiplier", type=float, default=0.8, metavar="N",
        help="noise over clipping norm; stands in for --epsilon here (0.8)",
    )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(run(options(), train))
