"""Where a sample is padded in its batch, and arguments without its padding."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dp_clipping.capture.samples.batch import Batch
from dp_clipping.capture.samples.padded import padded_samples
from dp_clipping.sampling.collate_check import CheckedCollate

SAMPLES = [torch.arange(1, n + 1) + 10 * n for n in (5, 2, 3, 5)]


def right(samples):
    return {
        "ids": pad_sequence(samples, batch_first=True),
        "n": torch.tensor(list(map(len, samples))),
    }


def left(samples):
    return {"ids": right([x.flip(0) for x in samples])["ids"].flip(1)}


def ordered(samples):
    return right(sorted(samples, key=len))


def shortest_of(collate, samples=SAMPLES):
    """Returns the batch, and its shortest sample."""
    whole, alone = CheckedCollate(collate, batch_dim=0, in_order=False).some_of(list(samples))
    return whole, padded_samples(whole, alone, alone.size)[0]


def only(padded, *args) -> list[Tensor]:
    (found, _), *_ = padded.arguments(Batch(args, {}, True))
    return list(found)


@pytest.mark.parametrize("collate", [right, left, ordered])
def test_the_row_without_its_padding(collate):
    whole, padded = shortest_of(collate)
    (found,) = only(padded, whole["ids"])
    assert found.tolist() == [SAMPLES[1].tolist()] * 2
    assert padded.at_end is (collate is left)
    assert whole["ids"][padded.company[0]].ne(0).all()


def test_tensors_that_the_loop_has_made():
    whole, padded = shortest_of(right)
    ids = whole["ids"]
    found = only(
        padded, ids, ids[:, 1:], ids.ne(0), torch.arange(5), torch.ones(3, 5, 5), whole["n"],
        torch.zeros(len(ids), 7),
    )  # fmt: skip
    assert [tuple(x.shape) for x in found] == [
        (2, 2),
        (2, 1),
        (2, 2),
        (2,),
        (2, 2, 2),
        (2,),
        (2, 7),
    ]
    assert found[3].tolist() == [0, 1]
    assert found[5].tolist() == [2, 2]


def test_what_is_another_one_alone():
    def counted(samples):
        ids = right(samples)["ids"]
        return {"ids": ids, "left": torch.arange(ids.shape[1]).flip(0).expand_as(ids)}

    whole, padded = shortest_of(counted)
    assert only(padded, whole["left"])[0].tolist() == [[1, 0]] * 2


def test_two_dimensions_of_one_length_are_tried_in_turn():
    whole, padded = shortest_of(right)
    arguments = padded.arguments(Batch((torch.ones(len(whole["ids"]), 5, 5),), {}, True))
    assert [x.shape[1:] for (x,), _ in arguments] == [(2, 2), (2, 5), (5, 2)]


def test_a_part_of_a_sample():
    def cut(samples):
        return right([x[: min(map(len, samples))] for x in samples])

    _, padded = shortest_of(cut)
    assert padded.part() == (2, 5)
    assert shortest_of(right)[1].part() is None


def test_zeros_that_follow_the_samples_are_no_samples():
    checked = CheckedCollate(right, batch_dim=0, in_order=False)
    whole, alone = checked.some_of(list(SAMPLES))
    rows = {name: torch.cat((x, torch.zeros_like(x))) for name, x in whole.items()}
    padded, *_ = padded_samples(rows, alone, 2 * alone.size)
    assert only(padded, whole["ids"])[0].tolist() == [SAMPLES[1].tolist()] * 2
