"""Checkpoints of sharded models: every rank writes its part, any number of ranks reads them.

`PATH` is a folder, `PATH.key` a file beside it, as secret as ever (see checkpoint.py).

    PATH/run.pt           what rank 0 writes: everything but the tensors of model and optimizer
    PATH/tensors-HEX/     those, in the format of torch.distributed.checkpoint, one file a rank

`run.pt` names the folder of its tensors, so that a save is whole from one moment to the next:

    1  every rank writes its part into a new folder
    2  the key file gets this run's key beside the ones it has
    3  run.pt takes the place of the old one
    4  keys and folders that no longer belong to it are removed

A load compares names, shapes and settings before it reads a tensor, reads into memory of its own
(for that long a rank holds its part of model and optimizer twice), and changes the run after all
ranks have all of it. Tensors are found by the parameter's name and lie wherever the ranks need
them: a checkpoint of four ranks loads on two, or in one process without any sharding.

The optimizer's state is taken by `state_dict()` and renamed here, since torch's own
`get_optimizer_state_dict` makes a step with an optimizer that has none: the saved run would not be
the one that goes on.
"""

import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opacus.accountants.accountant import IAccountant
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dp_clipping.checkpoint_file import (
    OWN,
    UNREADABLE,
    check_contents,
    key_path,
    plain,
    read,
    scheduler_state,
)  # fmt: skip
from dp_clipping.fits import check_fits
from dp_clipping.keys import read_keys, write_keys
from dp_clipping.resume import Resume, check_load, go_on, own_entry
from dp_clipping.run import Run, agree_on_content, agree_on_success, random_states
from dp_clipping.shards import box_of, slices_of
from measure.files import replacing

RUN_FILE = "run.pt"
TENSORS = "tensors"  # in the run's own entry: the name of their folder
FOLDER = re.compile(r"tensors-[0-9a-f]{16}")
MODULE, OPTIMIZER = "module_state_dict", "optimizer_state_dict"
SAFE = {
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip

State = dict[str, Any]


def is_sharded(run: Run) -> bool:
    """Whether the model's parameters lie in parts on several ranks. Every rank calls it."""
    return any(isinstance(x, DTensor) for x in run.model.network.state_dict().values())


# ---- saving --------------------------------------------------------------------------------------


def save(
    run: Run,
    accountant: IAccountant,
    path: Path,
    *,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    extra: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
    torch_kwargs: Mapping[str, Any],
) -> None:
    """As `checkpoint.save`, between two steps; every rank writes.

    Raises:
        RuntimeError: if a rank could not write.
        ValueError: if a load without executing code could not read what is to be saved, or could
            not find the parts of a parameter again.
    """
    random = random_states(run)
    name = _agreed_name(run)
    contents, tensors, problem = {}, {}, None
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, and a sharded model needs a folder: rename one")
        state = run.model.network.state_dict(**module_kwargs)
        contents = {
            **extra,
            MODULE: state,
            "privacy_accountant_state_dict": plain(accountant.state_dict()),
            OWN: {**own_entry(run, random), TENSORS: name},
        }
        if with_optimizer:
            contents[OPTIMIZER] = _by_name(run)
        for entry, scheduler in schedulers.items():
            contents[entry] = scheduler_state(scheduler)
        tensors = _take_tensors(contents)
        for key, x in tensors.items():
            _check_part(run, key, x)
        check_contents(contents, extra)
        (path / name).mkdir(parents=True, exist_ok=True)
    except Exception as error:
        problem = error
    _agree(run, f"save {path}", problem)
    try:
        _write_tensors(run, path / name, tensors)
    except (Exception, dcp.CheckpointException) as error:
        problem = error
    _agree(run, f"write its part of {path}", problem)
    if run.group is None or dist.get_rank(run.group) == 0:
        try:
            _write_run(path, contents, run, torch_kwargs)
        except Exception as error:
            problem = error
    agree_on_success(run, path, problem)
    if problem is not None:
        raise problem


def _agreed_name(run: Run) -> str:
    """Of a folder that is not there yet: rank 0's on every rank."""
    number = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=run.device)
    if run.group is not None:
        dist.broadcast(number, group=run.group, group_src=0)
    return f"tensors-{bytes(number.tolist()).hex()}"


def _names(run: Run) -> dict[nn.Parameter, str]:
    """Of parameters where they lie in parts, which is how an optimizer holds them."""
    network = run.model.network
    network.state_dict()  # FSDP2 puts back into parts what a forward has left gathered
    return {parameter: name for name, parameter in network.named_parameters()}


def _by_name(run: Run) -> State:
    """The optimizer's state with names of parameters for their numbers."""
    names, state = _names(run), run.optimizer.state_dict()
    name_of = {}
    for here, group in zip(run.optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(here["params"], group["params"], strict=True):
            name_of[number] = names[parameter]
    parameters = {name: parameter for parameter, name in names.items()}
    for number, values in state["state"].items():
        name = name_of[number]
        for key, x in values.items():
            if isinstance(x, DTensor) and not _lies_like(x, parameters[name]):
                raise ValueError(
                    f"the optimizer's {key} of {name} is sharded otherwise than {name} itself: "
                    "checkpoints of this optimizer's sharded state are not supported"
                )
    return {
        "state": {name_of[number]: dict(values) for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _lies_like(x: DTensor, parameter: Tensor) -> bool:
    return (
        isinstance(parameter, DTensor)
        and x.shape == parameter.shape
        and (x.device_mesh, x.placements) == (parameter.device_mesh, parameter.placements)
    )


def _take_tensors(contents: State) -> dict[str, Tensor]:
    """Those of module and optimizer, taken out of `contents`, by a name for each."""
    tensors = {}
    for name, x in contents[MODULE].items():
        if isinstance(x, Tensor):
            tensors[f"{MODULE}.{name}"] = x.detach()
    rest = {name: x for name, x in contents[MODULE].items() if not isinstance(x, Tensor)}
    contents[MODULE] = rest
    if OPTIMIZER in contents:
        for name, values in contents[OPTIMIZER]["state"].items():
            for key in [key for key, x in values.items() if isinstance(x, Tensor)]:
                tensors[f"{OPTIMIZER}.{name}.{key}"] = values.pop(key).detach()
    return tensors


def _check_part(run: Run, name: str, x: Tensor) -> None:
    """torch would write the part to where it lies: where several axes cut a dimension unevenly it
    may take that for another place."""
    if not isinstance(x, DTensor):
        return
    if run.group is None:
        raise ValueError(
            f"{name} is sharded, but this run's ranks know nothing of each other: grad_sample_mode "
            f"{run.settings['mode']!r} has no checkpoints of sharded models"
        )
    box = tuple((start, length) for start, length in box_of(x))
    for chunk in x.__create_chunk_list__():
        there = tuple(zip(chunk.offsets, chunk.sizes, strict=True))
        if chunk.sizes.numel() and there != box:
            raise ValueError(
                f"{name} {list(x.shape)} is cut unevenly by several axes of the mesh, and torch "
                f"{torch.__version__} would not find its parts again: choose sizes that divide"
            )


def _write_tensors(run: Run, folder: Path, tensors: dict[str, Tensor]) -> None:
    with _quiet():
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder),
            process_group=run.group,
            no_dist=run.group is None,
        )


def _write_run(path: Path, contents: State, run: Run, torch_kwargs: Mapping[str, Any]) -> None:
    beside = key_path(path)
    old = read_keys(beside)
    write_keys(beside, old if run.keys in old else [*old, run.keys])
    with replacing(path / RUN_FILE) as file:
        torch.save(contents, file, **torch_kwargs)
    write_keys(beside, [run.keys])
    for other in path.iterdir():
        if FOLDER.fullmatch(other.name) and other.name != contents[OWN][TENSORS]:
            shutil.rmtree(other, ignore_errors=True)


# ---- loading -------------------------------------------------------------------------------------


def load(
    run: Run,
    accountant: IAccountant,
    path: Path,
    *,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
    torch_kwargs: Mapping[str, Any],
    new_keys: bool,
) -> State:
    """As `checkpoint.load`, of a folder that `save` has written, on any number of ranks."""
    resume, tensors, problem = None, {}, None
    strict = module_kwargs.get("strict", True)
    reader: SafeReader | None = None
    try:
        check_load(run, module_kwargs)
        saved = read(path / RUN_FILE, torch_kwargs)
        reader, known = _read_shapes(path, saved)
        keys, notes = check_fits(
            run, accountant, path, _with(saved, known), with_optimizer, schedulers, new_keys, strict
        )
        _check_groups(run, saved, path)
        if not with_optimizer:
            saved.pop(OPTIMIZER, None)
        tensors = _room(run, saved, known)
        resume = Resume(saved, keys, notes)
    except Exception as error:
        if run.group is None:
            raise
        problem = error
    agree_on_content(run, path, resume and resume.digest(), problem)
    assert resume is not None
    assert reader is not None
    try:
        with _quiet():
            dcp.load(
                tensors,
                storage_reader=reader,
                process_group=run.group,
                no_dist=run.group is None,
            )
    except (Exception, dcp.CheckpointException) as error:
        problem = ValueError(f"{path} is not a whole checkpoint: its tensors cannot be read")
        problem.__cause__ = error
    _agree(run, f"load {path}", problem)
    resume.saved.update(_with(resume.saved, tensors))
    if OPTIMIZER in resume.saved:
        resume.saved[OPTIMIZER] = _by_number(run, resume.saved[OPTIMIZER])
    return go_on(run, accountant, path, resume, with_optimizer, schedulers, module_kwargs)


class SafeReader(dcp.FileSystemReader):
    """Reads the description of the tensors without executing what is in it.

    torch's own reader unpickles it; this one knows the few classes of which it consists, and
    whatever else is named there is refused.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("the description of the tensors is something else")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in SAFE
        if not known and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} is not in a checkpoint's description")
        return super().find_class(module, name)


def _read_shapes(path: Path, saved: State) -> tuple[SafeReader, dict[str, Tensor]]:
    """The reader, and shapes and dtypes of the tensors that it finds, as tensors without memory."""
    name = saved[OWN].get(TENSORS)
    if not (isinstance(name, str) and FOLDER.fullmatch(name)):
        raise ValueError(f"{path} does not name the folder of its tensors: it was changed")
    reader = SafeReader(path / name)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except PermissionError:
        raise
    except (*UNREADABLE, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {name} is cut short") from error
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
        raise ValueError(f"{path} holds something else than tensors in {name}: it was changed")
    return reader, {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
    }


def _with(saved: State, tensors: Mapping[str, Tensor]) -> State:
    """The entries with the tensors back in their places; `saved` is left as it is."""
    module, whole = dict(saved[MODULE]), dict(saved)
    whole[MODULE] = module
    state = {}
    if OPTIMIZER in saved:
        state = {name: dict(values) for name, values in saved[OPTIMIZER]["state"].items()}
        whole[OPTIMIZER] = {**saved[OPTIMIZER], "state": state}
    for full_name, x in tensors.items():
        entry, name = full_name.split(".", 1)
        if entry == MODULE:
            module[name] = x
        elif OPTIMIZER in saved:
            parameter, key = name.rsplit(".", 1)
            state.setdefault(parameter, {})[key] = x
    return whole


def _check_groups(run: Run, saved: State, path: Path) -> None:
    """The optimizer's groups hold the same parameters, in any order within one."""
    if OPTIMIZER not in saved:
        return
    names = _names(run)
    groups = zip(saved[OPTIMIZER]["param_groups"], run.optimizer.param_groups, strict=True)
    for number, (there, here) in enumerate(groups):
        differing = {*there["params"]} ^ {names[parameter] for parameter in here["params"]}
        if differing:
            raise ValueError(
                f"{path}: group {number} of the optimizer holds {min(differing)} in only one of "
                "the checkpoint and this run: resume with the groups of the saved run"
            )


def _room(run: Run, saved: State, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for this rank's part of each tensor that is to be loaded, laid out as the run's."""
    models = _models(run)
    room = {}
    for full_name, x in known.items():
        entry, name = full_name.split(".", 1)
        if entry == OPTIMIZER and OPTIMIZER not in saved:
            continue
        model = models.get(name if entry == MODULE else name.rsplit(".", 1)[0])
        if entry == MODULE and model is None:
            continue  # known to be missing, and allowed by strict=False
        if model is not None and model.shape == x.shape and (x.dim() or entry == MODULE):
            room[full_name] = torch.empty_like(model, dtype=x.dtype, requires_grad=False)
        elif entry == OPTIMIZER:
            room[full_name] = torch.empty(x.shape, dtype=x.dtype)
        else:
            raise ValueError(
                f"{name} is {list(x.shape)} in the checkpoint and {list(model.shape)} in this model"
            )
    return room


def _models(run: Run) -> dict[str, Tensor]:
    """Tensors by whose shape and layout those of a checkpoint are laid out, by name."""
    state = run.model.network.state_dict()
    named = {name: parameter for parameter, name in _names(run).items()}
    return {name: x for name, x in state.items() if isinstance(x, Tensor)} | named


def lay_out(run: Run, saved: State) -> State:
    """The entries of a checkpoint of one file, each rank with its parts of what it shards."""
    models = _models(run)
    module = {
        name: _part_of(x, models[name]) if name in models else x
        for name, x in saved[MODULE].items()
    }
    laid = {**saved, MODULE: module}
    if OPTIMIZER in saved:
        numbers = [n for group in saved[OPTIMIZER]["param_groups"] for n in group["params"]]
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        model_of = dict(zip(numbers, parameters, strict=True))
        state = {
            number: {key: _part_of(x, model_of[number]) for key, x in values.items()}
            for number, values in saved[OPTIMIZER]["state"].items()
        }
        laid[OPTIMIZER] = {**saved[OPTIMIZER], "state": state}
    return laid


def _part_of(x: Any, model: Tensor) -> Any:
    """A whole tensor as the sharded `model` has it, if they have a shape in common."""
    if not isinstance(x, Tensor) or not isinstance(model, DTensor) or x.shape != model.shape:
        return x
    part = x[slices_of(model)].to(model.device).contiguous()
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=x.shape,
        stride=model.stride(),
    )  # fmt: skip


def _by_number(run: Run, state: State) -> State:
    """What `_by_name` made, with this run's numbers."""
    names = _names(run)
    groups, number_of = [], {}
    for here, group in zip(run.optimizer.param_groups, state["param_groups"], strict=True):
        numbers = range(len(number_of), len(number_of) + len(here["params"]))
        number_of |= {names[p]: n for p, n in zip(here["params"], numbers, strict=True)}
        groups.append({**group, "params": list(numbers)})
    by_number = {number_of[name]: values for name, values in state["state"].items()}
    return {"state": dict(sorted(by_number.items())), "param_groups": groups}


# ---- both ----------------------------------------------------------------------------------------


def _agree(run: Run, what: str, problem: BaseException | None) -> None:
    """All ranks go on, or all raise: their own problem, or the number of a rank that has one."""
    if run.group is None:
        if problem is not None:
            raise problem
        return
    mine = torch.tensor([problem is None], dtype=torch.uint8, device=run.device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(run.group))]
    dist.all_gather(of_ranks, mine, group=run.group)
    if problem is not None:
        raise problem
    failed = [rank for rank, success in enumerate(of_ranks) if not success.item()]
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not {what}: its own error says why")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a process alone is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
