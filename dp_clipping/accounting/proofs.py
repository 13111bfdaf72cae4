"""Says which page of `docs/proofs` covers a run, and which of its options none covers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REGISTERED = "registered"
"""In place of the name of a function, mechanism or layer of the user's own."""

SAMPLINGS: dict[Any, str | None] = {
    "poisson": "gaussian_poisson", "truncated_poisson": "truncated_poisson",
    "balls_in_bins": "balls_in_bins",
}  # fmt: skip
PAGES: dict[str, dict[Any, str | None]] = {
    "accountant": {
        "pld": "gaussian_poisson", "prv": None, "rdp": None, "gdp": None,
        "that of the sampling": "gaussian_poisson",  # and the page of `sampling`
    },
    "sampling": SAMPLINGS | {"cyclic": "correlated_noise"},
    "poisson_sampling": {True: "gaussian_poisson", False: None},
    "noise_mechanism": {
        "gaussian": "gaussian_poisson", "correlated": "correlated_noise", REGISTERED: None,
    },
    "secure_mode": {False: "gaussian_poisson", True: "secure_noise"},
    "grad_sample_mode": {
        "per_sample": "clipping", "ghost": "clipping", "flash": "clipping",
        "bookkeeping": "clipping", "flash_bookkeeping": "clipping", "no_dp": None,
    },
    "clipping": {"flat": "clipping", "per_layer": "clipping"},
    "clipping_function": {
        "abadi": "clipping", "automatic": "clipping",
        REGISTERED: "clipping",  # cut off at C / n, whatever it returns
    },
    "layers": {"built in": "clipping", REGISTERED: None},
    "adaptive_threshold with sampling": SAMPLINGS | {"cyclic": None},
    "examples_per_unit": {"1": "clipping", "more": "units"},
    "examples_per_step": {"all": "clipping", "some": "units"},
    "views": {"any number": "accumulation"},
    "parts of a batch": {"any number": "accumulation"},
    "ranks": {"any number": "sharded_noise"},
}  # fmt: skip
"""Option -> value -> the page that covers it; None: no page does. Which values go together is
checked in `arguments`: what is not named here with another is refused there."""

CORRELATED = re.compile(
    r"correlated noise of \d+ bands( for \d+ epochs( of \d+ batches \(sum [-+.\de]+\))?)?"
)

WHY = {
    "accountant": "no page covers this account, which is Opacus's",
    "poisson_sampling": "no account of the loader's own batches is known",
    "noise_mechanism": "its account is its author's word",
    "grad_sample_mode": "it clips nothing and adds no noise",
    "layers": "that gradients and norms are right, and each sample's own, is their author's word",
    "adaptive_threshold with sampling": "no page covers both",
}


def covered_by(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns the pages that cover runs with these options, and what none covers, in words.

    A value that is not in `PAGES` is covered by none.
    """
    options = dict.fromkeys(option for run in runs for option in run.items())
    pages = {PAGES[name].get(value) for name, value in options}
    unproved = [
        f"{name}={value!r}: {WHY.get(name, 'no page covers it')}"
        for name, value in options
        if PAGES[name].get(value) is None
    ]
    return sorted(page for page in pages if page), unproved


def options_of(
    settings: Mapping[str, Any], accountant: str | None, *, own_layers: bool, is_adaptive: bool
) -> dict[str, Any]:
    """Returns the options of a run that a proof depends on, as `PAGES` has them.

    Args:
        settings: of the run, as a checkpoint saves them.
        accountant: the name of the engine's; None: the sampling has an account of its own.
        own_layers: some layers have a function of the user's own.
        is_adaptive: C follows a quantile of the norms.
    """
    options = {
        "accountant": accountant or "that of the sampling",
        "sampling": settings["sampling"],
        "poisson_sampling": settings["poisson_sampling"],
        "noise_mechanism": named(settings["noise_mechanism"]),
        "secure_mode": settings["secure_mode"],
        "grad_sample_mode": settings["mode"],
        "clipping": settings["clipping"],
        "clipping_function": named(settings["clipping_function"]),
        "layers": REGISTERED if own_layers else "built in",
        "examples_per_unit": "1" if settings["examples_per_unit"] == 1 else "more",
        "examples_per_step": "some" if settings["examples_per_step"] else "all",
        "views": "any number",
        "parts of a batch": "any number",
        "ranks": "any number",
    }
    if is_adaptive:
        options["adaptive_threshold with sampling"] = settings["sampling"]
    return options


def named(value: str) -> str:
    """Returns the name of a noise mechanism or clipping function as `PAGES` has it.

    Args:
        value: of the settings, where one that was registered has a digest: "name (digest)".
    """
    if CORRELATED.fullmatch(value):
        return "correlated"
    return REGISTERED if value.endswith(")") else value
