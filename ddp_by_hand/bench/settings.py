"""Settings of a run, made from the options and checked before any worker starts."""

import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ddp import IMPLEMENTATIONS, implementation, options_of
from ddp_by_hand.bench.names import (
    class_of,
    file_stem,
    is_plugin,
    numbered,
    options_in,
    plain,
    plugin_file,
    titles,
)
from ddp_by_hand.bench.options import (
    CLIPPING_NAMES,
    FUSED_MODES,
    NOT_PRIVATE,
    PRIVATE_MODES,
    Options,
)
from ddp_by_hand.bench.sharded import SHARDED, SPLIT, check_ranks, layout_of
from ddp_by_hand.lm.data import Batches, Corpus, open_data
from ddp_by_hand.lm.failures import locate
from ddp_by_hand.lm.layout import Layout
from ddp_by_hand.lm.model import PRESETS, ModelConfig
from ddp_by_hand.measure.options import flag, shared_values

KERNEL_OPTIONS = ("tile_size", "memory_budget_mb")  # of `Privacy`, for fused modes only
# Options of `ddp.wrap` with a value.
NO_SWITCHES = ("reduce", "process_group", "bucket_size_mb", "every", "outer_lr", "outer_momentum")
SEAM = ("before_gradient", "gradient_ready")  # by which a wrapper receives private gradients


@dataclass(frozen=True)
class Privacy:
    """How each sample's gradient is clipped, and how much noise is added; see `--help`."""

    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    clipping_style: str = "flat"
    clipping_function: str = "abadi"
    tile_size: int | None = None
    memory_budget_mb: float | None = None
    norm_reduction: str = "async"


@dataclass(frozen=True)
class Subject:
    """An implementation in a clipping mode: it has one row in the table and its own files.

    A fused mode's name may be followed by a norm algorithm: `flash:width`. `title` is what the
    implementation is called beside the others of a run, see `bench.names`.
    """

    implementation: str
    clipping: str = NOT_PRIVATE
    title: str = field(default="", compare=False)

    @property
    def is_private(self) -> bool:
        return self.clipping != NOT_PRIVATE

    @property
    def is_fused(self) -> bool:
        """Returns whether the mode uses fused kernels. Where they do not run there is no plan."""
        return mode_and_algorithm(self.clipping)[0] in FUSED_MODES

    @property
    def layout(self) -> Layout:
        return layout_of(self.implementation)

    @property
    def label(self) -> str:
        """Returns the subject's name in one word: `ddp`, or `ddp:bookkeeping`."""
        return self.name + (f":{self.clipping}" if self.is_private else "")

    @property
    def name(self) -> str:
        """Returns the implementation's name."""
        return self.title or class_of(self.implementation)

    @property
    def file_stem(self) -> str:
        """Returns the name in files: `ddp`, `ddp_bookkeeping`, or a plug-in's class name."""
        return file_stem(self.label)


@dataclass(frozen=True)
class Settings:
    """Settings of one call of the benchmark; sizes are per rank, sequences in tokens."""

    implementations: tuple[str, ...]
    clippings: tuple[str, ...]
    privacy: Privacy
    model: ModelConfig
    batch_size: int
    bucket_size_mb: float | None
    every: int | None
    num_epochs: int
    warmup_epochs: int
    steps_per_epoch: int
    rounds: int
    seed: int
    dtype: str
    compile: bool
    data: str
    timeout_s: float
    output_dir: Path
    show_plan: bool

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    @property
    def untimed_steps(self) -> int:
        """Counts untimed steps: warmup epochs, or else the first steps, which allocate memory."""
        return max(self.warmup_steps, min(3, self.num_steps - 1))

    def local_steps(self, subject: Subject) -> int:
        """Returns the steps of a round of `diloco`; 1 of an implementation that has no rounds.

        The last step ends a round, and as many timed steps as it has begin no further one.
        """
        if not has_rounds(subject.implementation):
            return 1
        most = max(1, self.num_steps - self.untimed_steps)
        return self.every or max(n for n in range(1, most + 1) if self.num_steps % n == 0)

    @property
    def subjects(self) -> list[Subject]:
        """Returns all subjects, in table order."""
        return [
            Subject(name, mode, title)
            for name, title in titles(self.implementations).items()
            for mode in self.clippings
        ]

    @property
    def plugin_files(self) -> list[str]:
        return [str(file) for file in map(plugin_file, self.implementations) if file]

    @property
    def has_private(self) -> bool:
        return any(subject.is_private for subject in self.subjects)

    def identity(self, subject: Subject) -> dict:
        """Returns the settings that comparable measurements share: all but names, order, places.

        An ordinary one does not depend on the settings of privacy.
        """
        skipped = {"implementations", "clippings", "privacy", "output_dir", "rounds", "timeout_s",
                   "show_plan"}  # fmt: skip
        common = {k: v for k, v in asdict(self).items() if k not in {*skipped, "every"}}
        if has_rounds(subject.implementation):
            common["every"] = self.local_steps(subject)
        if not subject.is_private:
            return common
        mode = mode_and_algorithm(subject.clipping)[0]
        return {**common, "clipping": {"mode": mode, **self.privacy_of(subject)}}

    def privacy_of(self, subject: Subject) -> dict:
        """Returns the settings that have an effect on a private subject."""
        found = asdict(self.privacy)
        if not subject.layout.splits_tensors:
            del found["norm_reduction"]
        if subject.is_fused:
            return {**found, "norm_algorithm": mode_and_algorithm(subject.clipping)[1]}
        return {k: v for k, v in found.items() if k not in KERNEL_OPTIONS}


def settings_from(options: Options, device_type: str, default_folder: Path) -> Settings:
    """Check what the options mean together.

    Raises:
        ValueError: one line with the option, the mistake and a remedy.
    """
    names, clippings = _names(options), _clippings(options)
    if options.implementations == tuple(IMPLEMENTATIONS) and set(clippings) != {NOT_PRIVATE}:
        names = [name for name in names if not _not_private(name)]  # of the default, those that can
    for mistake in _mistakes(options, names, clippings):
        raise ValueError(mistake)
    settings = shared_values(
        options,
        Settings,
        implementations=tuple(names),
        clippings=tuple(clippings),
        privacy=Privacy(**_privacy_given(options)),
        model=_model(options, device_type),
        steps_per_epoch=options.steps_per_epoch or (3 if options.profile else 6),
        data=_data_source(options.data),
        timeout_s=options.timeout,
        output_dir=options.output_dir or default_folder,
    )
    timed = settings.num_steps - settings.untimed_steps
    if options.every and (settings.num_steps % options.every or options.every > timed):
        raise ValueError(
            f"--every {options.every}: give a number that divides the {settings.num_steps} steps "
            f"and is at most {timed}, the timed ones, or change --steps-per-epoch"
        )
    batches_for(settings, rank=0, world_size=1)  # unreadable, empty or too short a text
    return settings


def check_world(settings: Settings, world_size: int) -> None:
    """Raises ValueError, in one line, for implementations that need other numbers of ranks."""
    for name in settings.implementations:
        try:
            check_ranks(name, settings.model, world_size)
        except ValueError as error:
            names = {field.name for field in fields(ModelConfig)}
            raise ValueError(f"--implementations: {_with_options(str(error), names)}") from error


def mode_and_algorithm(clipping: str) -> tuple[str, str]:
    """Splits a clipping mode: `flash:width` is ("flash", "width"), `flash` is ("flash", "auto")."""
    mode, _, algorithm = clipping.partition(":")
    return mode, algorithm or "auto"


def has_rounds(name: str) -> bool:
    """Returns whether ranks of an implementation step apart, as those of `diloco`."""
    return name not in SHARDED and "every" in options_of(implementation(plain(name)))


@functools.cache
def source_digest(name: str) -> str | None:
    """Returns a digest of a plug-in's file: after an edit it is measured again."""
    file = plugin_file(name)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else None


def batches_for(settings: Settings, rank: int, world_size: int) -> Batches:
    return Batches(
        _corpus(settings.data, settings.model.vocab_size),
        batch_size=settings.batch_size,
        context_length=settings.model.context_length,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
    )


@functools.cache
def _corpus(source: str, vocab_size: int) -> Corpus:
    """Read once per process: every implementation trains on the same text."""
    return open_data(source, vocab_size)


def _names(options: Options) -> list[str]:
    names, option = options.implementations, "--implementations"
    if options.profile_implementation and not options.profile:
        raise ValueError("--profile-implementation: give --profile too")
    if options.profile and options.profile_implementation not in (None, "all"):
        names, option = [options.profile_implementation], "--profile-implementation"
    for name in (name for name in names if name not in SHARDED):
        if name.endswith(".py"):
            raise ValueError(f"{option}: {name}: name its class too, as {name}:ClassName")
        if ":" not in name and plain(name) not in IMPLEMENTATIONS:
            raise ValueError(
                f"{option}: {name!r} is unknown, choose from "
                f"{', '.join((*IMPLEMENTATIONS, *SHARDED))}, or give path/to/file.py:ClassName; "
                "separate several with spaces"
            )
        try:
            known = options_of(implementation(plain(name)))
        except ValueError as error:
            place = locate(error.__cause__, [str(plugin_file(name))]) if error.__cause__ else ""
            raise ValueError(f"{option}: {error}{place and f', at {place}'}") from error
        if unknown := [one for one in options_in(name) if one not in known or one in NO_SWITCHES]:
            raise ValueError(
                f"{option}: {name}: {plain(name)} has no option {unknown[0]} that can be turned "
                "on, leave it out"
            )
    _check_once(option, [name for name in names if not is_plugin(name)])
    return numbered(names)


def _check_once(option: str, values: list[str]) -> None:
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{option}: {twice[0]} appears twice, give it once")


def _clippings(options: Options) -> list[str]:
    synonyms = {"no_dp": NOT_PRIVATE, **{f"{mode}:auto": mode for mode in FUSED_MODES}}
    modes = [synonyms.get(mode, mode) for mode in options.clipping]
    known = (NOT_PRIVATE, *CLIPPING_NAMES)
    if unknown := [mode for mode in modes if mode not in known]:
        raise ValueError(f"--clipping {unknown[0]}: unknown, choose from {', '.join(known)}")
    _check_once("--clipping", modes)
    return modes


def _privacy_given(options: Options) -> dict:
    """Returns the settings of privacy that were given."""
    found = {field.name: getattr(options, field.name) for field in fields(Privacy)}
    return {name: value for name, value in found.items() if value is not None}


def _mistakes(options: Options, names: list[str], clippings: list[str]) -> Iterator[str]:
    """Yields what options do not mean together, or would have no effect, each with a remedy."""
    private = [mode for mode in clippings if mode != NOT_PRIVATE]
    given = _privacy_given(options)
    of_kernels = [name for name in KERNEL_OPTIONS if name in given]
    of_kernels += ["show_plan"] if options.show_plan else []
    if of_kernels and not any(Subject("", mode).is_fused for mode in private):
        yield (
            f"{flag(of_kernels[0])}: only fused kernels have use for it, give --clipping "
            f"{' or '.join(FUSED_MODES)} too"
        )
    if given and not private:
        yield (
            f"{flag(next(iter(given)))}: only --clipping MODE clips and adds noise, give one of "
            f"{', '.join(PRIVATE_MODES)} too"
        )
    if options.show_plan and options.profile:
        yield "--show-plan: leave it out, with --profile the summaries have the plan"
    if options.enable_profiling and not (options.profile and private):
        yield "--enable-profiling: give --profile and a private --clipping mode too"
    sharded = next((name for name in names if name in SHARDED), None)
    if sharded and options.memory_budget_mb is not None:
        yield (
            f"--memory-budget-mb: the ranks of {sharded} must run backward equally often, leave it "
            f"out or leave out {sharded}"
        )
    if options.norm_reduction is not None and not set(SPLIT) & set(names):
        yield (
            "--norm-reduction: only ranks that share samples add up their norms, give "
            f"--implementations {' or '.join(SPLIT)} too"
        )
    if options.every is not None and not any(map(has_rounds, names)):
        yield "--every: only diloco has rounds, give --implementations diloco too"
    for reason in filter(None, map(_not_private, names if private else ())):
        yield f"--clipping {private[0]}: {reason}, or give --clipping {NOT_PRIVATE}"
    if options.warmup_epochs > options.num_epochs:
        yield (
            f"--warmup-epochs {options.warmup_epochs} exceeds --num-epochs {options.num_epochs}: "
            "warmup is a part of them, give no more"
        )
    if options.warmup_epochs == options.num_epochs and not options.profile:
        yield (
            f"--warmup-epochs {options.warmup_epochs} leaves no epoch to time, give a larger "
            "--num-epochs"
        )


def _not_private(name: str) -> str | None:
    """Returns why an implementation cannot be private, if it cannot.

    Private training hands its clipped sums to a plug-in, which must sum them over ranks.
    """
    if name in SHARDED:
        return None
    cls = implementation(plain(name))
    if refusal := getattr(cls, "refuses_privacy", None):
        return f"{refusal[0]}: leave {name} out"
    lacking = [f"method {m}" for m in SEAM if not hasattr(cls, m)]
    lacking += [f"option {o}" for o in ("reduce", "process_group") if o not in options_of(cls)]
    if not lacking:
        return None
    return (
        f"{name} lacks {', '.join(lacking)}, which private training needs: make it a subclass of "
        "ddp.DataParallel"
    )


def _model(options: Options, device_type: str) -> ModelConfig:
    preset = options.preset or ("small" if device_type == "cuda" else "laptop")
    names = {field.name for field in fields(ModelConfig)}
    given = {k: v for k, v in vars(options).items() if k in names and v is not None}
    try:
        return replace(PRESETS[preset], **given)
    except ValueError as error:
        raise ValueError(_with_options(str(error), names)) from error


def _with_options(message: str, fields: set[str]) -> str:
    """Replaces field names by option names in a message: `d_model` becomes `--d-model`."""
    names = "|".join(sorted(fields))
    return re.sub(rf"\b({names})\b", lambda m: flag(m[0]), message)


def _data_source(source: str) -> str:
    """Makes a path absolute, so that a run resumed from another folder reads the same text."""
    if source in ("stdlib", "synthetic", ""):  # an empty path would be the current folder
        return source
    return str(Path(source).expanduser().absolute())
