"""The parts of a private run: which ranks it has, and what is left if one of them does not fit."""

import warnings

import pytest
import torch

from dp_clipping.arguments.given import refuse_used
from dp_clipping.build import build_criterion, build_loader, build_model, keys_for, ranks_of
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.sampling.loader import PoissonLoader
from tests.dp_clipping.arguments.test_settings import settings
from tests.support import engine


def parts(given):
    ranks = ranks_of(given)
    keys = keys_for(given, ranks)
    loader = build_loader(given, ranks, keys)
    return ranks, keys, loader, given.with_batch_size(ranks.data_ranks)


def test_a_model_takes_batches_from_a_poisson_loader():
    ranks, _, loader, given = parts(settings())
    model = build_model(given, ranks, loader, hide_unprotected=False)
    assert isinstance(loader, PoissonLoader)
    loader.on_batch(7)
    assert model.step_state.batch_number == 7
    assert model.step_state.usage is loader.usage


def test_a_model_knows_the_batch_size_of_another_loader():
    with pytest.warns(UserWarning, match="does not hold"):
        ranks, _, loader, given = parts(settings(poisson_sampling=False))
    assert loader is given.data_loader
    model = build_model(given, ranks, loader, hide_unprotected=False)
    assert model.step_state.usage.batch_size == engine.BATCH


def test_what_does_not_fit_leaves_the_network_as_it_was():
    adaptive = AdaptiveThreshold(9.0, quantile=0.5, expected_batch_size=engine.BATCH)
    ranks, _, loader, given = parts(settings(adaptive_threshold=adaptive))
    model = build_model(given, ranks, loader, hide_unprotected=False)
    with pytest.raises(ValueError, match="adaptive threshold starts at"):
        build_criterion(given, model)
    refuse_used(module=given.module)
    given.module(torch.zeros(2, 4)).sum().backward()
    assert all(p.grad is not None for p in given.module.parameters())


def test_warnings_point_to_the_users_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine.build(poisson_sampling=False)
    (warning,) = [w for w in found if "does not hold" in str(w.message)]
    assert warning.filename == engine.__file__
