"""`zero1`: what is sent and when, where parameters lie."""

import copy

import pytest
import torch

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, small_buckets, wrapped
from tests.support.on_ranks import on_ranks
from tests.support.recorder import recording

NAME = "zero1"


@on_ranks(2)
def test_what_is_sent(context: Context) -> None:
    with recording(context.group) as recorder:
        model = wrap(NAME, Chain(), process_group=recorder, **small_buckets(NAME))
        optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
        for step in range(2):
            loss = chain_loss(step)(model, context.rank)
            assert all(unit.gradient is None for unit in model.units), "memory is not freed"
            recorder.events.clear()
            loss.backward()
            started = [e.what for e in recorder.events if e.what == "reduce_scatter"]
            assert len(started) == len(model.units) > 2, "not while backward runs"
            assert model.gradients.reductions == (step + 1) * len(model.units)
            model.finish_gradient_synchronization()
            recorder.events.clear()
            optimizer.step()
            events = [e.what for e in recorder.events]
            assert events[:2] == ["all_gather", "wait"], "whether all ranks are about to step"
            assert events[2:] == ["all_gather"] * len(model.units) + ["wait"] * len(model.units)
            assert model.stats()["collectives"] == 2 * len(model.units)
            reduced = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            gathered = sum(unit.values.nbytes for unit in model.units)
            assert model.stats()["bytes"] == reduced + gathered
            optimizer.zero_grad()


@on_ranks(2)
def test_optimizers_gather_what_they_hold(context: Context) -> None:
    """Each gathers the units it has a parameter of, and changes what it holds alone."""
    with recording(context.group) as recorder:
        pair = Beside(context, NAME)
        model = wrap(NAME, pair.model.module, process_group=recorder, **small_buckets(NAME))
        pair.model = model
        parts = [list(net.parameters()) for net in (model, pair.reference)]
        ours, theirs = [(own[:3], own[3:]) for own in parts]  # of layer 1 each has one parameter
        optimizers = [model.make_optimizer(torch.optim.Adam, params=part) for part in ours]
        plain = [torch.optim.Adam(part) for part in theirs]
        for step in range(2):
            pair.step(chain_loss(step), set_to_none=False)
            pair.backward(chain_loss(9 + step))
            pair.finish()
            for optimizer, other, part in zip(optimizers, plain, ours, strict=True):
                held = {p for p in part if p.requires_grad}
                before = {p: (p._version, p.detach().clone()) for p in model.parameters()}
                units = [u for u in model.units if held.intersection(u.parameters)]
                recorder.events.clear()
                optimizer.step()
                other.step()
                _, *gathers = [e.numel for e in recorder.events if e.what == "all_gather"]
                assert gathers == [unit.slice_numel for unit in units]
                assert len(units) < len(model.units)
                for p, (version, value) in before.items():
                    assert (p._version > version) == (p in held)
                    assert torch.equal(p, value) == (p not in held)
            for p, q in zip(*parts, strict=True):
                torch.testing.assert_close(p, q)
            pair.zero_grad(set_to_none=True)
        optimizers[0].load_state_dict(optimizers[0].state_dict())


@on_ranks(2)
def test_parameters_stay_views(context: Context) -> None:
    """Before and after steps and a checkpoint."""
    pair = Beside(context, NAME)
    state = copy.deepcopy(pair.model.state_dict())
    optimizers = pair.optimizers(torch.optim.AdamW)
    for turn in range(3):
        pair.train(optimizers, chain_loss(turn))
        for unit in pair.model.units:
            for view, p in zip(unit.views(unit.values), unit.parameters, strict=True):
                assert view.data_ptr() == p.data_ptr()
    assert any(not torch.equal(v, pair.model.state_dict()[k]) for k, v in state.items())
    pair.model.load_state_dict(state)
    assert all(torch.equal(v, pair.model.state_dict()[k]) for k, v in state.items())


@on_ranks(2)
def test_other_memory_of_a_parameter_is_refused(context: Context) -> None:
    pair = Beside(context, NAME)
    optimizer = pair.model.make_optimizer(torch.optim.SGD, lr=0.1)
    weight = pair.model.module.layers[1].weight
    for other in (weight.data[:1].clone(), weight.data[:2], weight.data.clone(), weight.data.t()):
        pair.backward(chain_loss(0))
        pair.finish()
        kept, weight.data = weight.data, other
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight has got other memory .*copy_"):
            optimizer.step()
        weight.data = kept
        pair.zero_grad(set_to_none=True)


@on_ranks(2)
def test_a_graph_with_old_parameters_is_refused(context: Context) -> None:
    """A graph from before the step has saved parameters that have changed since."""
    model = wrapped(context, NAME)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    early = chain_loss(1)(model.module, context.rank)
    chain_loss(0)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(early, list(model.parameters()))
