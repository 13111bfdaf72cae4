"""Saves the runs of an engine, and continues them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.arguments.checks import checked
from dp_clipping.checkpoint import save_load as checkpoint
from dp_clipping.checkpoint.file_format import given_schedulers, key_file
from dp_clipping.checkpoint.run import Snapshot
from dp_clipping.runs.accounts import Accounts
from dp_clipping.runs.steps import look_at_account


class Checkpoints(Accounts):
    """Saves a run with the account, and continues it."""

    @checked()
    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
        data_loader: DataLoader | None = None,
        key_path: str | os.PathLike | None = None,
        weights: str = "all",
    ) -> None:
        """Writes a checkpoint to `path` and the key to `path` + `".key"`; see `checkpoint`.

        Every rank calls it between two steps, and rank 0 writes. If the process is killed
        meanwhile, the old or the new checkpoint can be loaded. The loader's position, the number of
        steps and the random states of torch, NumPy and Python are always saved.

        Args:
            path: a file name; of a model sharded by FSDP2 or tensor parallelism, the name of a
                folder to which every rank writes its part.
            module: as `make_private` returned it.
            optimizer: as `make_private` returned it. Without it the state of the wrapped one
                (momentum) is not saved.
            noise_scheduler: Opacus's; its state is saved.
            grad_clip_scheduler: Opacus's; its state is saved.
            checkpoint_dict: further entries of the user's (a learning-rate scheduler's
                `state_dict()`, say): tensors, numbers, strings, in lists, tuples or dicts.
            module_state_dict_kwargs: for the network's `state_dict`.
            torch_save_kwargs: for `torch.save`.
            data_loader: as `make_private` returned it.
            key_path: another place of the key.
            weights: `"all"` of the network's weights are written, or its `"trainable"` ones, or
                `"none"`. Load the others before `load_checkpoint`, which compares their digest.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: for a module that is not of this engine, or entries that a load could not
                read without executing code.
        """
        snapshot = Snapshot(
            run=self._run_of(module, optimizer, data_loader),
            path=Path(path),
            with_optimizer=optimizer is not None,
            schedulers=given_schedulers(noise_scheduler, grad_clip_scheduler),
            module_kwargs=module_state_dict_kwargs or {},
            torch_kwargs=torch_save_kwargs or {},
            key_file=key_file(path, key_path),
            weights=weights,
        )
        checkpoint.save(snapshot, checkpoint_dict or {})

    @checked()
    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
        data_loader: DataLoader | None = None,
        new_keys: bool = False,
        key_path: str | os.PathLike | None = None,
    ) -> dict[str, Any]:
        """Continues a saved run, bit for bit, after a `make_private` with the same arguments.

        Every rank calls it. Nothing is changed unless everything fits, on every rank. No code from
        the file is executed. The engine's account becomes the saved one, and keeps what this
        engine has counted beyond it (with a warning). Steps that the saved key then makes again
        are not counted twice. With another σ or C than before, or of another batch, they raise
        RuntimeError. It warns if the steps of the account lead above a `target_epsilon`. A folder
        or file may have been saved on another number of ranks, sharded or not.

        Args:
            path: as given to `save_checkpoint`.
            module: as `make_private` returned it.
            optimizer: as `make_private` returned it.
            data_loader: as `make_private` returned it.
            noise_scheduler: made as before; it receives the saved state.
            grad_clip_scheduler: made as before; it receives the saved state.
            module_load_dict_kwargs: for the network's `load_state_dict`.
            torch_load_kwargs: for `torch.load`; tensors come to the CPU by default.
            new_keys: continue with a new key for noise and samples. Needed if the key file is lost,
                the data are others of the same length, or another continuation of this checkpoint
                is published. A new key is also made, with a warning, for data of another length,
                another σ, C, clipping, number of ranks or kind of device, and if a scheduler or
                optimizer is missing in the checkpoint or here.
            key_path: as given to `save_checkpoint`.

        Returns:
            The entries of `checkpoint_dict`, and those of module and accountant, as in Opacus.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is cut short, of another run, or without its key, or accountant gdp
                would have to hold steps of two kinds. The message has one line.
        """
        snapshot = Snapshot(
            run=self._run_of(module, optimizer, data_loader),
            path=Path(path),
            with_optimizer=optimizer is not None,
            schedulers=given_schedulers(noise_scheduler, grad_clip_scheduler),
            module_kwargs=module_load_dict_kwargs or {},
            torch_kwargs=torch_load_kwargs or {},
            key_file=key_file(path, key_path),
        )
        entries = checkpoint.load(snapshot, new_keys)
        look_at_account(snapshot.run, path, self.epsilon_at_end)
        return entries
