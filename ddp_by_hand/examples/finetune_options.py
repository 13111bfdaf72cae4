"""The command line and the configuration file of `examples.finetune`."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import flag, is_seed, option, requires

PROGRAM = "ddp_by_hand.examples.finetune"
DOES = (
    "Fine-tune a causal language model privately, on the rows of a table. --config FILE reads "
    "options from a TOML file."
)
RESUMABLE = ("output_dir", "resume", "device", "report_every", "save_every", "prompt", "new_tokens")
EXAMPLES = """\
examples:
  python -m ddp_by_hand.examples.finetune
      a small GPT-2 on made-up sentences, epsilon 8: about a minute on two cores
  python -m ddp_by_hand.examples.finetune --model path/to/model --train lora \
      --data notes.csv --column note
      LoRA adapters of a model that you have saved, on a column of your table
  python -m ddp_by_hand.examples.finetune --config run.toml --epsilon 4
      options from a file, as in: data = "notes.jsonl"; a flag has precedence
  python -m ddp_by_hand.examples.finetune --resume
      continues after Ctrl-C or a crash, with the same options, bit for bit
"""

_finite = requires(lambda x: 0 < x < math.inf, "is {}: give a finite number above 0")
_share = requires(lambda x: 0 < x < 1, "is {}: give a number between 0 and 1")
_count = requires(lambda x: x >= 1, "is {}: give 1 or more")


# fmt: off
@dataclass(frozen=True)
class Options:
    model: str = option("gpt2", group="model and data", metavar="MODEL", help=(
        "gpt2 or llama: a small one with random weights; or the folder of a model that "
        "save_pretrained has written"))
    train: str = option("full", "every parameter, or LoRA adapters", choices=("full", "lora"))
    lora_rank: int = option(8, "rank of the adapters", metavar="R", check=_count)
    data: str = option("made", metavar="FILE",
        help="a .csv or .jsonl file, or made: sentences that are made here")
    column: str = option("text", "column of the file with the text of each row", metavar="NAME")
    length: int = option(48, "tokens of a row; longer ones are cut off", metavar="T",
        check=requires(lambda x: x >= 2, "is {}: give 2 or more, each is predicted from others"))

    epsilon: float = option(8.0, "what the whole run may spend", group="privacy", metavar="E",
        check=_finite)
    delta: float | None = option(None, metavar="D", check=_share,
        help="probability that the bound fails (default: rows to the power -1.1)")
    max_grad_norm: float = option(1.0, "norm that the gradient of a row is clipped to",
        metavar="C", check=_finite)

    epochs: int = option(3, "how often a row is drawn, on average", group="run", metavar="N",
        check=_count)
    batch_size: int = option(128, "rows of a step, on average", metavar="N", check=_count)
    max_physical_batch_size: int = option(32, "rows at a time: memory, not the result",
        metavar="N", check=_count)
    learning_rate: float = option(1e-2, "learning rate of AdamW", metavar="R", check=_finite)
    seed: int = option(
        0, "seed of the initial weights, never of noise and batches", metavar="N", check=is_seed
    )
    device: str = option("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    prompt: str = option("the patient ", "prompt that the model continues, before and after",
        metavar="TEXT")
    new_tokens: int = option(40, "tokens to generate", metavar="N", check=_count)
    output_dir: Path = option(Path("results_finetune"), metavar="FOLDER",
        help="receives the model, its privacy statement and checkpoints")
    resume: bool = option(False, "continue the run in --output-dir (default: begin one)")
    report_every: int = option(4, "steps between two lines", metavar="N", check=_count)
    save_every: int = option(8, "steps between two checkpoints", metavar="N", check=_count)

    def __post_init__(self) -> None:
        small, large = self.max_physical_batch_size, self.batch_size
        if large % small:
            raise ValueError(
                f"--batch-size is {large}, no multiple of --max-physical-batch-size {small}: give "
                f"--batch-size {-(-large // small) * small}"
            )
# fmt: on


def with_config(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with those of `--config FILE` before them.

    Raises:
        BadInput: the file cannot be read, or has what is no option.
    """
    words = [
        part
        for word in arguments
        for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    if "--config" not in words:
        return words
    at = words.index("--config")
    with bad_input():
        if at + 1 == len(words):
            raise ValueError("--config: give a file, --config run.toml")
        return _words_of(Path(words[at + 1])) + words[:at] + words[at + 2 :]


def _words_of(path: Path) -> list[str]:
    """Returns the options of a file as words of a command line."""
    known = {one.name for one in fields(Options)}
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}: give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}: write lines as epsilon = 8.0") from error
    words = []
    for name, value in values.items():
        if name.replace("-", "_") not in known:
            raise ValueError(
                f"--config {path}: {name} is no option: give one of {', '.join(sorted(known))}"
            )
        if value is not False:
            words += [flag(name)] if value is True else [flag(name), str(value)]
    return words
