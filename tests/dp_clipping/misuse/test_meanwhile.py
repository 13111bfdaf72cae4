"""Between `make_private` and `step()`: gradients, parameters, hooks and processes that change."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from opacus.accountants import create_accountant
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import ddp
from dp_clipping import PrivacyEngine
from tests.support import engine, replicas, zoo
from tests.support import sharded_steps as sharded
from tests.support.engine import CHANGED, CHANGES, in_parts
from tests.support.on_ranks import on_ranks

BATCH = engine.data()[:5]


@pytest.fixture
def run():
    return engine.build()


@pytest.mark.parametrize("change", ["clip_grad_norm_", "mul_", "replaced", "zeros"])
def test_a_noisy_gradient_may_be_changed(run, change):
    for _ in range(2):
        engine.backward(run, BATCH)
        run.optimizer.pre_step()
        CHANGES[change](run.model.network)
        run.optimizer.step()
        run.model.network.zero_grad()  # as loops do that zero the network that they know
    assert run.optimizer.steps == 2


def test_the_wrapped_optimizer_applies_no_sums_without_noise(run):
    engine.backward(run, BATCH)
    before = engine.parameters(run)
    with pytest.raises(
        RuntimeError, match=r"without noise: call step\(\) of the one that make_pri"
    ):
        run.optimizer.original_optimizer.step()
    assert all(map(torch.equal, before, engine.parameters(run)))
    run.optimizer.step()
    run.optimizer.original_optimizer.step()  # the noisy gradient again, which gives nothing away


@pytest.mark.parametrize("variant", ["ddp", "ddp_bucketed", "ddp_individual_v2", "torch_ddp"])
@on_ranks(2)
def test_a_gradient_changed_on_ranks(context, variant):
    """On ranks: right after backward, and after the exchange was finished by hand."""
    run = replicas.build(context, variant)
    replicas.train(run, 1)
    for finish in (False, True):
        run.optimizer.zero_grad()
        *batch, _ = next(iter(run.loader))
        run.criterion(run.model(batch[0]), batch[1]).backward()
        if finish:
            run.model.finish_gradient_synchronization()
        for parameter in run.model.network.parameters():
            parameter.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match=CHANGED):
            run.optimizer.step()
        run.optimizer.zero_grad()
        replicas.train(run, 1)
        run.optimizer.zero_grad()
        *batch, _ = next(iter(run.loader))
        run.criterion(run.model(batch[0]), batch[1]).backward()
        (run.model.finish_synchronization if finish else
         run.model.module.finish_gradient_synchronization)()  # fmt: skip
        run.optimizer.step()
    assert run.optimizer.steps == 5


def halved(net):
    next(net.parameters()).grad *= 0.5


def clipped_value(net):
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)


def ordinary_backward(net):
    net(zoo.tokens(2, 6)[0]).sum().backward()


NOT_THERE = r"is not there before.*optimizer\.pre_step\(\)|that is not there cannot be saved"
USES = (Tensor.zero_, Tensor.detach, Tensor.norm, Tensor.sum, Tensor.clone, copy.deepcopy,
        pickle.dumps, lambda grad: grad.data.mul_(2))  # fmt: skip
AT_ONCE = (
    CHANGES["clip_grad_norm_"], clipped_value, halved, CHANGES["zeros"],
    *(lambda net, use=use: use(next(net.parameters()).grad) for use in USES),
    *(lambda net, kind=kind: kind(net.parameters()).step()
      for kind in (torch.optim.SGD, torch.optim.Adam)),
)  # fmt: skip
IN_THE_STEP = (
    CHANGES["zero_grad"],
    lambda net: setattr(next(net.parameters()), "grad", None),
    lambda net: next(net.parameters()).grad.add_(1.0),
)
AFTER_THE_SUM = (
    lambda net: next(net.parameters()).grad.mul_(0.5),
    lambda net: setattr(next(net.parameters()), "grad", 0.5 * next(net.parameters()).grad),
)


@on_ranks(2)
def test_a_gradient_and_a_parameter_changed_under_fsdp2(context):
    """The sums of sharded parameters are out of reach until the step: what uses them raises."""
    run = replicas.build(context, shard=lambda net: sharded.shard_fsdp2(
        net, "block", DeviceMesh.from_group(context.group, "cpu")), name="transformer")  # fmt: skip
    net = run.model.network

    def backward():
        run.optimizer.zero_grad()
        *batch, _ = next(iter(run.loader))
        run.criterion(run.model(batch[0]), batch[1]).backward()

    def is_refused(when=CHANGED):
        with pytest.raises(RuntimeError, match=when):
            run.optimizer.step()

    backward()
    for change in AT_ONCE:
        with pytest.raises(RuntimeError, match=NOT_THERE):
            change(net)
    for change in IN_THE_STEP:
        backward()
        change(net)
        is_refused()
    backward()
    with run.model.capture.attached(None):
        ordinary_backward(net)
    is_refused("an ordinary backward")
    for change in AFTER_THE_SUM:
        backward()
        run.model.finish_synchronization()
        change(net)
        is_refused()
    assert run.optimizer.steps == 0
    for _ in range(2):  # the network's own zero_grad, as of plain ones
        backward()
        run.optimizer.step()
        net.zero_grad()
    backward()
    run.optimizer.pre_step()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    run.optimizer.step()
    run.optimizer.zero_grad()
    replicas.train(run, 1)
    assign(run.model.network)
    with pytest.raises(RuntimeError, match="is another tensor than at make_private"):
        replicas.train(run, 1)


def test_ordinary_training_goes_on_afterwards():
    run = engine.build()
    engine.step(run)
    net = run.model.to_standard_module()
    nn.functional.cross_entropy(net(engine.data()[:5][0]), engine.data()[:5][1]).backward()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    run.optimizer.original_optimizer.step()


def test_a_stale_gradient_of_a_frozen_parameter_is_not_applied():
    net = engine.network()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    net[0].weight.requires_grad_(False)
    run = engine.build(module=net)
    before = net[0].weight.clone()
    engine.step(run)
    assert torch.equal(net[0].weight, before)


def assign(net):
    net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()}, assign=True)


def test_a_state_that_is_copied_is_trained_on(run):
    engine.step(run)
    state = {name: 2 * value for name, value in run.model.network.state_dict().items()}
    run.model.network.load_state_dict(state)
    run.model.network[0].weight.data = torch.zeros(5, 4)
    engine.step(run)
    assert run.model.network[0].weight.any()


def test_hooks_are_added_and_the_step_is_counted(run):
    seen = []
    run.optimizer.attach_step_hook(lambda optimizer: seen.append(optimizer.steps))
    run.optimizer.attach_step_hook(lambda _: seen.append("second"))
    engine.step(run)
    assert seen == [0, "second"]
    run.optimizer.step_hook = None
    engine.step(run)
    assert seen == [0, "second"]
    assert [n for _, _, n in run.engine.accountant.history] == [2]


def test_a_second_accountant_counts_beside(run):
    other = create_accountant("rdp")
    run.optimizer.attach_step_hook(other.get_optimizer_hook_fn(sample_rate=0.25))
    engine.step(run)
    assert other.history == run.engine.accountant.history == [(1.0, 0.25, 1)]


def test_hooks_of_torch_see_the_noisy_gradient(run):
    seen = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(run.model.step_state.is_open))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    engine.step(run)
    assert seen == [False, "after"]
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        run.optimizer.unknown  # noqa: B018


LOSSES_OF_STEPS = {
    "cleared": lambda accountant: accountant.history.clear(),
    "replaced": lambda accountant: setattr(accountant, "history", []),
    "edited": lambda accountant: accountant.history.__setitem__(0, (100.0, 0.25, 1)),
    "loaded": lambda accountant: accountant.load_state_dict(create_accountant("rdp").state_dict()),
}


@pytest.mark.parametrize("lose", LOSSES_OF_STEPS)
def test_a_history_that_lost_steps_gives_no_epsilon(lose, path):
    run = engine.build(noise_generator=None)
    engine.step(run)
    LOSSES_OF_STEPS[lose](run.engine.accountant)
    save = {"path": path, "module": run.model, "optimizer": run.optimizer}
    for use in (
        lambda: run.engine.get_epsilon(1e-5),
        lambda: run.engine.save_checkpoint(**save),
        lambda: engine.step(run),
    ):
        with pytest.raises(RuntimeError, match="has lost 1 steps that this engine has counted"):
            use()


def test_an_accountant_that_forgets_steps_is_refused(run):
    engine.step(run)
    with pytest.raises(ValueError, match="lacks 1 steps that this engine has counted"):
        run.engine.accountant = create_accountant("rdp")
    longer = create_accountant("prv")
    longer.history = [(2.0, 0.1, 3), *run.engine.accountant.history]
    run.engine.accountant = longer
    engine.step(run)
    assert sum(n for _, _, n in run.engine.accountant.history) == 5


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_an_optimizer_is_not_copied(run, duplicate):
    with pytest.raises(TypeError, match="holds the noise key"):
        duplicate(run.optimizer)


def in_a_fork(function):
    """What the function returns in a forked process, as text."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        child = os.fork()
    if not child:
        try:
            answer = str(function())
        except BaseException as error:
            answer = repr(error)
        os.write(sender, answer.encode())
        os._exit(0)
    os.close(sender)
    with open(receiver, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA cannot go on in a fork")
def test_a_fork_draws_no_noise(run):
    engine.step(run)
    assert "was forked from the one that called make_private" in in_a_fork(lambda: engine.step(run))
    engine.step(run)

    def afresh():
        other = engine.build()
        engine.step(other)
        return other.optimizer.steps

    assert in_a_fork(afresh) == "1"


def test_a_network_in_evaluation_is_refused():
    net = engine.network().eval()
    with pytest.raises(ValueError, match=r"in evaluation.*call network\.train\(\) before"):
        engine.build(module=net)
    run = engine.build(module=net.train())
    net.eval()
    with pytest.raises(RuntimeError, match=r"in evaluation: call model\.train\(\)"):
        engine.step(run)
    run.model.eval()
    run.model(BATCH[0])
    run.model.train()
    net[1].eval()
    engine.step(run)


def test_a_step_after_evaluation_says_what_is_missing(run):
    run.model.eval()
    nn.functional.cross_entropy(run.model(BATCH[0]), BATCH[1]).backward()
    with pytest.raises(RuntimeError, match=r"model\.train\(\) before the private forward"):
        run.optimizer.step()


WRAPPERS = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "ddp.wrap": lambda model: ddp.wrap("ddp_bucketed", model),
    "torch_ddp": lambda model: ddp.wrap("torch_ddp", model),
    "fully_shard": lambda model: torch.distributed.fsdp.fully_shard(
        model, mesh=torch.distributed.init_device_mesh("cpu", (1,))
    ),
    "a container in DDP": lambda model: nn.parallel.DistributedDataParallel(nn.Sequential(model)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_private_model_is_not_wrapped_again(run, one_rank, name):
    """By the wrapper's constructor where that asks the model, else in its first forward."""
    with pytest.raises(RuntimeError, match=r"wrap or shard the network first and make that priv"):
        WRAPPERS[name](run.model)(BATCH[0])


def test_fsdp1_takes_the_parameters_away(run, one_rank):
    sharded = torch.distributed.fsdp.FullyShardedDataParallel(
        run.model, device_id=torch.device("cpu")
    )
    loss = run.criterion(sharded(BATCH[0]), BATCH[1])
    with pytest.raises(RuntimeError, match="is another tensor than at make_private"):
        loss.backward()


def test_no_hook_sees_other_modules_or_optimizers(run):
    of_modules = ("_global_module_registration_hooks", "_global_forward_hooks")
    assert not any(getattr(nn.modules.module, name) for name in of_modules)
    elsewhere = nn.Linear(2, 2)
    engine.backward(run, BATCH)
    torch.optim.SGD(elsewhere.parameters(), lr=0.1).step()
    assert nn.Sequential(run.model)[0] is run.model


def test_nothing_is_made_private_twice(run):
    net = run.model.network
    for module in (run.model, net, nn.Sequential(net)):
        with pytest.raises(ValueError, match=r"module is private or .*to_standard_module\(\)"):
            engine.build(module=module)
    for name, thing, match in (
        ("optimizer", run.optimizer, "give optimizer.original_optimizer"),
        ("criterion", run.criterion, "give criterion.criterion"),
        ("data_loader", run.loader, "does Poisson sampling"),
    ):
        changes = {name: thing, "poisson_sampling": name != "data_loader"}
        with pytest.raises(ValueError, match=match):
            PrivacyEngine().make_private(**engine.arguments() | changes)


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_network_is_made_private_again_as_the_message_says(wrap_model):
    run = engine.build(wrap_model=wrap_model)
    with pytest.raises(ValueError, match=r" optimizer\.model\.to_standard_module\(\)"):
        engine.build(module=run.model)
    engine.step(engine.build(module=run.optimizer.model.to_standard_module()))


class Half:
    """Batches of the first half."""

    drop_last = True
    batch_size = 6

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([list(range(6)), list(range(6, 12))])


def test_a_sampler_over_all_of_the_data_is_accepted():
    data = engine.data()
    state = torch.get_rng_state()
    for sampler in (SubsetRandomSampler(range(24)), torch.utils.data.RandomSampler(data)):
        engine.build(data_loader=DataLoader(data, batch_size=6, sampler=sampler))
        torch.set_rng_state(state)
    half = TensorDataset(*data[:12])
    engine.build(data_loader=DataLoader(half, batch_sampler=Half()))


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_several_batches_are_not_accumulated_by_hand():
    run = engine.build(poisson_sampling=False)
    batches = iter(run.loader)
    engine.backward(run, next(batches))
    with pytest.raises(RuntimeError, match=r"6 samples in a step that has 6 already.*BatchMem"):
        engine.backward(run, next(batches))
    run.optimizer.step()
    run.optimizer.zero_grad()
    x, y = next(batches)
    for part in (slice(0, 2), slice(2, 6)):  # one batch in parts
        engine.backward(run, (x[part], y[part]))
    run.optimizer.step()
    run.optimizer.zero_grad()
    with in_parts(run, 2) as loader:
        for batch in loader:
            engine.step(run, batch)
    assert run.optimizer.steps == 2 + len(run.loader)
