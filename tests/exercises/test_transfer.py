"""A recorded reduce-scatter or all-gather delivers at `wait()`, and watches its tensors."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_by_hand.exercises.record import Record, RecordedWork
from ddp_by_hand.exercises.transfer import Transfer, has_memory


class Finished:
    """A collective that has ended before anything waits for it."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> None:
        return None


def gather() -> tuple[torch.Tensor, Transfer]:
    """An all-gather in place, to [0, 1, 2, 3] on rank 1, which sends [2, 3]."""
    flat = torch.tensor([7.0, 7.0, 2.0, 3.0])
    transfer = Transfer("all_gather_single", flat, flat[2:])
    transfer.received.copy_(torch.arange(4.0))
    return flat, transfer


def test_a_tensor_that_was_freed_or_overwritten_is_told_or_refused():
    flat, transfer = gather()
    flat[2] = 5.0
    assert transfer.deliver() == "overwritten"
    flat, transfer = gather()
    flat.untyped_storage().resize_(0)
    assert transfer.deliver() == "freed"
    flat = torch.zeros(4)
    own = flat[:2].clone()
    flat.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="all_gather_single of a tensor whose memory was freed"):
        Transfer("all_gather_single", flat, own)


def test_every_way_of_waiting_delivers_once(tmp_path):
    record = Record(tmp_path / "log")
    for wait in (RecordedWork.wait, RecordedWork.get_future, RecordedWork.is_completed):
        flat, transfer = gather()
        work = RecordedWork(Finished(), record, "all_gather_single", transfer)
        wait(work)
        assert flat.tolist() == [0, 1, 2, 3], wait.__name__
        flat.zero_()
        work.wait()
        assert not flat.any()
    assert [e.what for e in record.events] == ["wait"] * 3


def test_memory_is_held_until_it_is_delivered_or_resized_to_nothing(tmp_path):
    flat, transfer = gather()
    storage = StorageWeakRef(flat.untyped_storage())
    work = RecordedWork(Finished(), Record(tmp_path / "log"), "all_gather_single", transfer)
    del flat, transfer
    assert has_memory(storage)
    work.wait()
    assert not has_memory(storage)
    tensor = torch.zeros(4)
    storage = StorageWeakRef(tensor.untyped_storage())
    assert has_memory(storage)
    tensor.untyped_storage().resize_(0)
    assert not has_memory(storage)
    assert not has_memory(None)
