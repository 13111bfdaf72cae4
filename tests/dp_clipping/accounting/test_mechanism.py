"""What an account's steps release, and what it cannot hold together."""

import pytest

from dp_clipping.accounting.mechanism import DEFAULT, ZERO_OUT, Mechanism, batches_per_epoch

OTHER = Mechanism("gaussian, cyclic", "cyclic", ZERO_OUT)


def test_an_account_holds_steps_of_one_mechanism():
    OTHER.refuse_beside(OTHER, [(1.0, 0.1, 3)])
    OTHER.refuse_beside(None, [])
    with pytest.raises(ValueError, match=r"has accounted for 'gaussian'.*PrivacyEngine for each$"):
        OTHER.refuse_beside(DEFAULT, [])


def test_steps_that_no_run_has_made_are_of_the_default():
    """Those of an accountant that was passed on, or of a mechanism of the user's own."""
    with pytest.raises(ValueError, match="has accounted for 'gaussian'"):
        OTHER.refuse_beside(None, [(1.0, 0.1, 3)])
    DEFAULT.refuse_beside(None, [(1.0, 0.1, 3)])


def test_epsilons_of_one_relation_may_be_added():
    with pytest.raises(ValueError, match="add up their ε and δ"):
        Mechanism("mine").refuse_beside(DEFAULT, [])


def test_batches_of_an_epoch():
    assert batches_per_epoch([(1.0, 1 / 3, 4), (2.0, 1 / 3, 1)]) == 3
    assert batches_per_epoch([(1.0, 1 / 3, 4), (1.0, 1 / 4, 1)]) == 1  # each step counts as a use
