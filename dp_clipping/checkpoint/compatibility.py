"""Decides whether a checkpoint fits a run, and whether its key may be used: see save_load.py.

Everything here reads and compares; nothing is changed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dp_clipping.accounting.history import Parts, count, joined
from dp_clipping.checkpoint.file_format import (
    ACCOUNTANT,
    DETAILS,
    MODULE,
    OPTIMIZER,
    SCHEDULERS,
    scheduler_state,
)
from dp_clipping.checkpoint.run import Snapshot
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.keys import Keys, read_keys

# Of what the account says ε: the unit of privacy and the mechanism; default: of a file without it.
UNIT = {
    "examples_per_unit": 1, "unit_ids are given": False, "noise_mechanism": "gaussian",
    "sampling": "poisson", "max_batch_size": None, "secure_mode": False,
}  # fmt: skip
NOISE = (  # another value needs other noise and samples; the first four are of the data
    "poisson_sampling", "num_samples", "num_units", "sample_rate",
    "noise_multiplier", "max_grad_norm", "clipping", "clipping_function", "gamma",
    "loss_reduction", "expected_batch_size", "examples_per_step", "views",
    "world_size", "data_ranks", "device",  # dropout's masks are others there
)  # fmt: skip


def check_fits(
    snapshot: Snapshot, saved: dict[str, Any], new_keys: bool
) -> tuple[Keys | None, Parts, list[str]]:
    """Returns the key to continue with, steps that stay in the account, and warnings.

    Raises:
        ValueError: the checkpoint does not fit.
    """
    keys, notes = _check_run(snapshot, saved, new_keys)
    return keys, _check_account(snapshot, saved), notes


def _check_account(snapshot: Snapshot, saved: dict[str, Any]) -> Parts:
    """Returns steps of this engine that the saved account lacks."""
    account = snapshot.run.account
    history = saved[ACCOUNTANT]["history"]
    unsaved = account.beyond(saved[DETAILS]["account"], snapshot.run)
    for _, part in unsaved.values():
        history = joined(history, part)
    if account.computes and account.accountant.mechanism() == "gdp" and len(history) > 1:
        lacking = sum(count(part) for _, part in unsaved.values())
        raise ValueError(
            f"{snapshot.path}: accountant gdp cannot hold {lacking} steps that this engine has "
            "counted beside the saved ones, of another noise_multiplier or sample rate: load in a "
            "new engine, and their ε add up"
        )
    return unsaved


def _check_run(
    snapshot: Snapshot, saved: dict[str, Any], new_keys: bool
) -> tuple[Keys | None, list[str]]:
    """Returns the key to continue with (None: a new one) and notes."""
    run, path, with_optimizer = snapshot.run, snapshot.path, snapshot.with_optimizer
    details, here = saved[DETAILS], run.describe()
    there = {"views": 1} | details["run"]  # files from before there were views
    _check_accountant(saved[ACCOUNTANT]["mechanism"], run.account.accountant.mechanism(), path)
    _check_adaptive(details.get("adaptive_threshold"), run.optimizer.adaptive_threshold, path)
    for name in ("private", "optimizer"):
        _check_same(name, there[name], here[name], path)
    for name, default in UNIT.items():
        _check_same(name, there.get(name, default), here[name], path)
    if here["sampling"] == "truncated_poisson":  # its account depends on their number
        for name in ("num_samples", "num_units"):
            _check_same(name, there[name], here[name], path)
    _check_tensors("trainable parameter", there["parameters"], here["parameters"], path)
    if snapshot.module_kwargs.get("strict", True):
        of_network = run.model.network.state_dict()
        _check_tensors("entry", *map(_shapes, (saved[MODULE], of_network)), path)
    if OPTIMIZER in saved:
        sizes = (
            [len(group["params"]) for group in groups]
            for groups in (saved[OPTIMIZER]["param_groups"], run.optimizer.param_groups)
        )
        _check_same("number of parameters in the optimizer's groups", *sizes, path)
    notes = _check_schedulers(saved, snapshot.schedulers, path)
    if with_optimizer != (OPTIMIZER in saved):
        of_saved, given = ("no", "an") if with_optimizer else ("an", "no")
        notes.append(f"{of_saved} optimizer in the checkpoint and {given} optimizer given")
    if new_keys:
        return None, notes
    changed = [name for name in NOISE if there.get(name) != here[name]]
    _check_units(snapshot, details)
    if changed:
        notes.append(", ".join(f"{n} was {there.get(n)} and is {here[n]}" for n in changed))
    if notes:
        # Another σ or C, now or later: two results under the same noise could be solved for a sum.
        return None, [f"{note}, so noise and samples come from a new key" for note in notes]
    return _find_keys(snapshot.key_file, details["key_fingerprint"]), notes


def _check_units(snapshot: Snapshot, details: Mapping[str, Any]) -> None:
    """Raises ValueError for other `unit_ids`, where the key of the saved run is there to tell."""
    for keys in read_keys(snapshot.key_file):
        is_own = keys.fingerprint == details["key_fingerprint"]
        if not (is_own and details.get("units")):
            continue
        if details["units"] != keys.mac(snapshot.run.units_digest):
            raise ValueError(
                f"{snapshot.path}: unit_ids put other examples together than in the saved run, and "
                "ε is of one kind of unit: resume with the unit_ids of the saved run, or pass "
                "new_keys=True if the data have changed"
            )


def _check_accountant(there: str, here: str, path: Path) -> None:
    """Raises ValueError for another accountant, but for that of files from before there was pld.

    All keep the same history, so pld computes ε of those steps too.
    """
    if there != here and (there, here) != ("prv", "pld"):
        raise ValueError(
            f"{path}: accountant is {there} in the checkpoint and {here} in this run: build "
            f'PrivacyEngine(accountant="{there}")'
        )


def _check_adaptive(saved: dict | None, adaptive: AdaptiveThreshold | None, path: Path) -> None:
    if (saved is None) != (adaptive is None):
        there, here = ("no", "an") if saved is None else ("an", "no")
        raise ValueError(
            f"{path}: {there} adaptive_threshold in the checkpoint and {here} adaptive_threshold "
            "in this run: resume with the settings of the saved run"
        )


def _check_same(name: str, there: Any, here: Any, path: Path) -> None:
    if there != here:
        raise ValueError(
            f"{path}: {name} is {there} in the checkpoint and {here} in this run: resume with the "
            "settings of the saved run"
        )


def _check_tensors(kind: str, there: Mapping, here: Mapping, path: Path) -> None:
    for name in [*there, *here]:
        if there.get(name) != here.get(name) or (name in there) != (name in here):
            is_there, is_here = there.get(name, "missing"), here.get(name, "missing")
            raise ValueError(
                f"{path} is of another model: {kind} {name} is {is_there} in the checkpoint and "
                f"{is_here} in this model"
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else None
        for name, value in state.items()
    }


def _check_schedulers(
    saved: dict[str, Any], schedulers: Mapping[str, Any], path: Path
) -> list[str]:
    notes = []
    for entry in SCHEDULERS:
        name = entry.removesuffix("_state_dict")
        if (entry in saved) != (entry in schedulers):
            there, here = ("a", "no") if entry in saved else ("no", "a")
            notes.append(f"{there} {name} in the checkpoint and {here} {name} given")
        elif entry in saved:
            here = sorted(scheduler_state(schedulers[entry]))
            _check_same(f"state of the {name}", sorted(saved[entry]), here, path)
    return notes


def _find_keys(file: Path, fingerprint: str) -> Keys:
    keys = read_keys(file)
    for key in keys:
        if key.fingerprint == fingerprint:
            return key
    what = "holds no key of this checkpoint" if keys else "is missing"
    raise ValueError(
        f"{file} {what}, so a resumed run would have other noise and other samples than the "
        "saved one: restore the file, or pass new_keys=True for a new key (as private, but not the "
        "same run)"
    )
