"""The trainings that are repeated: settings, what was published, and where.

Hyperparameters were chosen with `--tune`: on the last 5,000 training images, without them in
training. That choice is not accounted for: on these data sets it is taken to be public.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddp_by_hand.experiments.records.texts import Planned

STDLIB = "stdlib"
TRAMER = "Tramèr and Boneh 2021, arXiv:2011.11660"
PAPERNOT = "Papernot et al. 2021, arXiv:2007.14191"
TANG = "in the manner of Tang et al. 2023, arXiv:2306.06076"
DE = "in the manner of De et al. 2022, arXiv:2204.13650"


@dataclass(frozen=True)
class Row:
    """A training to (ε, δ) by DP-SGD on Poisson batches, of images or of the library's text.

    Attributes:
        method: with ε, and the data set if it is not Fashion-MNIST, the row's name.
        network: a name of `networks.NETWORKS`.
        published: score at this ε on this data set; None: none was published.
        source: the paper.
        batches: of an epoch; each image is in each of them with probability 1 / batches.
        optimizer: SGD with momentum, or Adam.
        rate: its learning rate, constant.
        clip: C.
        groups: of channels, over which an image's features are normalised.
        decay: of the running mean of parameters that is tested, a step.
        views: random shifts and flips of an image that are one unit of privacy.
        pretraining: steps on synthetic images before.
        sampling: as of `make_private`.
        physical: the most images of a microbatch.
        grid: field -> values that `--tune` tries.
    """

    method: str
    network: str
    epsilon: float
    source: str
    published: float | None = None
    data: str = "fashion-mnist"
    delta: float = 1e-5
    batches: int = 7
    epochs: int = 40
    optimizer: str = "sgd"
    rate: float = 4.0
    clip: float = 0.1
    momentum: float = 0.9
    groups: int = 27
    decay: float = 0.95
    views: int = 1
    pretraining: int = 0
    sampling: str = "poisson"
    physical: int | None = None
    grid: dict[str, tuple] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        data = "" if self.data in ("fashion-mnist", STDLIB) else f"-{self.data}"
        return f"{self.method}{data}@{self.epsilon:g}"

    @property
    def unit(self) -> str:
        return "nats per byte" if self.data == STDLIB else "%"

    def settings(self) -> dict[str, Any]:
        """Returns what a run follows from, beside engine and seed."""
        known = asdict(self)
        return {name: known[name] for name in known if name not in ("grid", "published", "source")}

    @property
    def steps(self) -> int:
        return self.batches * self.epochs


def at(row: Row, *points: tuple[float, float | None, float]) -> list[Row]:
    """Returns the row at several (ε, published figure, rate)."""
    return [replace(row, epsilon=e, published=figure, rate=rate) for e, figure, rate in points]


LINEAR = Row(
    "scatter_linear", "scatter_linear", 2.7, TRAMER, rate=8.0, epochs=80,
    grid={"rate": (2.0, 4.0, 8.0, 16.0), "epochs": (80,)},
)  # fmt: skip
LARGE = Row(  # not in the paper: half of all images in a batch
    "scatter_linear_large", "scatter_linear", 2.7, TRAMER, rate=16.0, batches=2, epochs=120,
    grid={"rate": (8.0, 16.0, 32.0), "epochs": (60, 120)},
)  # fmt: skip
BINS = replace(LINEAR, method="scatter_linear_bins", sampling="balls_in_bins")  # nor this
CNN = Row(
    "scatter_cnn", "scatter_cnn", 2.7, TRAMER, rate=8.0, epochs=80,
    grid={"batches": (15, 29), "rate": (2.0, 4.0, 8.0), "epochs": (40,)},
)  # fmt: skip
TEMPERED = Row(
    "tempered_cnn", "tempered_cnn", 2.7, PAPERNOT, batches=15, epochs=80,
    grid={"rate": (4.0, 8.0), "epochs": (40, 80)},
)  # fmt: skip
GROUP_NORM = Row(
    "group_norm_cnn", "group_norm_cnn", 2.7, DE, batches=15,
    grid={"rate": (4.0, 8.0), "epochs": (40,)},
)  # fmt: skip
RAND = replace(GROUP_NORM, method="pretrained_cnn", source=TANG, pretraining=1000)
WIDE = Row(
    "wide_resnet", "wide_resnet", 2.7, DE, rate=4.0, batches=30, epochs=20, views=4, physical=1024,
    grid={"rate": (8.0, 16.0), "views": (1, 4), "batches": (15,), "epochs": (40,)},
)  # fmt: skip
FULL = Row(
    "lm_full", "transformer", 8.0, "none", data=STDLIB, delta=2e-6, batches=128, epochs=2,
    optimizer="adam", rate=3e-3, clip=1.0, pretraining=1000, grid={"rate": (1e-3, 3e-3, 1e-2)},
)  # fmt: skip
LORA = replace(FULL, method="lm_lora", network="transformer_lora")
SCRATCH = replace(FULL, method="lm_scratch", pretraining=0)

ROWS: Sequence[Row | Planned] = [
    *at(LINEAR, (1.0, None, 4.0), (2.7, 89.5, 8.0), (3.0, 89.7, 8.0), (8.0, None, 16.0)),
    *at(LARGE, (2.7, 89.5, 16.0)),
    *at(BINS, (1.0, None, 4.0), (2.7, 89.5, 8.0), (8.0, None, 16.0)),
    *at(CNN, (1.0, None, 4.0), (2.7, 88.7, 8.0), (3.0, 89.0, 8.0), (8.0, None, 8.0)),
    *at(TEMPERED, (1.0, None, 2.0), (2.7, 86.1, 4.0), (8.0, None, 4.0)),
    *at(GROUP_NORM, (1.0, None, 4.0), (2.7, None, 8.0), (8.0, None, 8.0)),
    *at(RAND, (1.0, None, 4.0), (2.7, None, 8.0), (8.0, None, 8.0)),
    *at(WIDE, (2.7, None, 4.0)),
    replace(LINEAR, data="mnist", epsilon=2.93, published=98.7),
    replace(LINEAR, data="cifar10", epsilon=3.0, published=67.0),
    replace(CNN, data="mnist", epsilon=2.93, published=98.7),
    replace(CNN, data="cifar10", epsilon=3.0, published=69.3),
    Planned(2.0),
    Planned(8.0),
    *(replace(row, epsilon=e) for row in (FULL, LORA, SCRATCH) for e in (2.0, 8.0)),
]


def rows_of(names: Sequence[str] | None) -> list[Row | Planned]:
    """Returns the rows of these names: `scatter_linear@2.7`, or `scatter_linear` for every ε.

    Raises ValueError for a name that no row has.
    """
    if names is None:
        return list(ROWS)
    found = [row for name in names for row in ROWS if name in (row.name, row.name.split("@")[0])]
    known = {row.name: row.name.split("@")[0] for row in ROWS}
    for name in names:
        if name not in known and name not in known.values():
            alike = [row for row in known if known[row] == name.split("@")[0]]
            others = ", ".join(alike or sorted(set(known.values())))
            raise ValueError(f"no row is called {name}: give {others}")
    return found
