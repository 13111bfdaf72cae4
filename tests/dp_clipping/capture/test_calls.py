"""What `make_private` returns is used as the network: wrapped, and as the user's own module."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from ddp import wrap
from dp_clipping.capture.calls import ADDED
from dp_clipping.model import PrivateModel
from dp_clipping.trials.objects import SKIPPED
from tests.support.engine import build, fixed

BOTH = pytest.mark.parametrize("wrap_model", [True, False], ids=["wrapped", "own"])


class Network(nn.Module):
    """Owns a bare parameter, so that its own forward is captured too, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.first(input_ids).tanh() * self.scale + self.shift)

    def generate(self):
        return self(torch.ones(1, 3))


class Plain(Network):
    """Owns no bare parameter: only its layers are captured."""

    def __init__(self):
        super().__init__()
        self.scale.requires_grad_(False)


class Holder(nn.Module):
    """A framework's module that has the model as a child."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def made(wrap_model, network=None, mode="bookkeeping", module=None):
    torch.manual_seed(0)
    network = Network() if network is None else network
    module = network if module is None else module
    run = build(
        module=module, dataset=TensorDataset(torch.randn(24, 3), torch.randint(2, (24,))),
        batch_size=4, wrap_model=wrap_model, noise_generator=fixed(1), grad_sample_mode=mode,
    )  # fmt: skip
    return run.engine, run.model, run.optimizer, run.criterion, run.loader


def train(model, optimizer, criterion, loader):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        model.zero_grad()  # as Hugging Face's Trainer calls it


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "per_sample", "no_dp"])
@pytest.mark.parametrize("kind", [Network, Plain])
def test_the_users_own_module_trains_as_the_wrapped_one(kind, mode):
    weights = []
    for wrap_model in (True, False):
        torch.manual_seed(3)
        _, *private = made(wrap_model, kind(), mode)
        train(*private)
        weights.append([p.detach().clone() for p in private[0].parameters()])
    assert all(map(torch.equal, *weights))


def test_the_search_for_state_passes_over_what_is_added():
    assert ADDED <= SKIPPED


def test_it_is_the_users_own_module():
    network = Network()
    _, model, optimizer, *_ = made(False, network)
    assert model is network
    assert type(model) is Network
    assert isinstance(optimizer.model, PrivateModel)


@BOTH
def test_signature_and_methods_are_the_networks(wrap_model):
    _, model, *_ = made(wrap_model)
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "attention_mask"]
    assert model.generate().shape == (1, 2)


@BOTH
def test_names_are_the_networks(wrap_model):
    network = Network()
    names = list(network.state_dict())
    parameters = [name for name, _ in network.named_parameters()]
    _, model, *_ = made(wrap_model, network)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == parameters
    assert [name for name, _ in model.named_buffers()] == ["shift"]


@BOTH
def test_state_goes_both_ways(wrap_model):
    _, model, *_ = made(wrap_model)
    other = Network()
    other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    changed = {name: value + 1 for name, value in other.state_dict().items()}
    model.load_state_dict(changed)
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("prefix", ["module.", "_module."])
def test_names_of_earlier_wrappers_load(prefix):
    _, model, *_ = made(True)
    changed = {f"{prefix}{name}": value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(changed)
    holder = Holder(model)
    holder.load_state_dict({f"inner.{name}": value + 1 for name, value in changed.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, changed[f"{prefix}{name}"] + 1)


def test_a_child_that_is_called_module_keeps_its_name():
    network = nn.Sequential()
    network.add_module("module", nn.Linear(3, 2))
    _, model, *_ = made(True, network)
    changed = {name: value + 1 for name, value in model.state_dict().items()}
    assert list(changed) == ["module.weight", "module.bias"]
    model.load_state_dict(changed)
    assert torch.equal(model.state_dict()["module.bias"], changed["module.bias"])


@BOTH
def test_a_module_that_holds_it_saves_and_loads_plain_names(wrap_model):
    _, model, *_ = made(wrap_model)
    holder = Holder(model)
    state = holder.state_dict()
    assert list(state) == [f"inner.{name}" for name in Network().state_dict()]
    holder.load_state_dict({name: value + 1 for name, value in state.items()})
    Holder(Network()).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        holder.load_state_dict({"inner.shift": torch.ones(4)})


@BOTH
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("kind", [Network, Plain])
def test_a_copy_is_the_plain_network(kind, again, wrap_model):
    _, model, *private = made(wrap_model, kind())
    train(model, *private)
    x = torch.ones(2, 3)
    twin = again(model)
    assert type(twin) is kind
    for module, plain in zip(twin.modules(), kind().modules(), strict=True):
        assert vars(module).keys() == vars(plain).keys()
    assert torch.equal(twin(x), model.eval()(x))
    twin(x).sum().backward()  # ordinary gradients, of the copy alone
    assert twin.first.weight.grad is not None
    assert model.first.weight.grad is None
    model.train()
    train(model, *private)  # goes on as it was


@BOTH
def test_torch_saves_the_plain_network(wrap_model):
    _, model, *_ = made(wrap_model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Network
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


@BOTH
def test_weights_are_averaged(wrap_model):
    _, model, *private = made(wrap_model)
    average = AveragedModel(model, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)
    average.update_parameters(model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, *private)
    average.update_parameters(model)
    for mean, old, new in zip(average.parameters(), before, model.parameters(), strict=True):
        assert torch.allclose(mean, (old + new) / 2)


def test_a_forward_of_the_users_own_is_in_the_copy():
    network = Plain()
    network.first.forward = functools.partial(lambda self, x: 2 * nn.Linear.forward(self, x),
                                              network.first)  # fmt: skip
    _, model, *_ = made(False, network)
    assert torch.equal(copy.deepcopy(model)(torch.ones(1, 3)), model.eval()(torch.ones(1, 3)))


@BOTH
def test_evaluation_and_training_follow_the_model(wrap_model):
    _, model, optimizer, criterion, loader = made(wrap_model)
    model.eval()
    with torch.no_grad():
        assert criterion(model(torch.ones(2, 3)), torch.zeros(2, dtype=torch.long)).item() > 0
    model.train()
    train(model, optimizer, criterion, loader)
    assert optimizer.steps == 6


@BOTH
def test_afterwards_the_network_is_as_before(wrap_model):
    network = Network()
    before = {id(module): set(vars(module)) for module in network.modules()}
    optimizer = made(wrap_model, network)[2]
    assert optimizer.model.to_standard_module() is network
    assert {id(module): set(vars(module)) for module in network.modules()} == before
    made(wrap_model, network)  # and may be private again


@BOTH
def test_checkpoints_take_either(wrap_model, tmp_path):
    engine, model, optimizer, criterion, loader = made(wrap_model)
    train(model, optimizer, criterion, loader)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, data_loader=loader)
    again, other, optimizer2, criterion2, loader2 = made(not wrap_model)
    again.load_checkpoint(path=path, module=other, optimizer=optimizer2, data_loader=loader2)
    train(model, optimizer, criterion, loader)
    train(other, optimizer2, criterion2, loader2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert engine.check(model, (torch.randn(3, 3), torch.tensor([0, 1, 1]))).ok


@BOTH
@pytest.mark.parametrize(
    "build", [lambda: nn.EmbeddingBag(5, 3), lambda: nn.Conv1d(1, 3, 1), lambda: nn.LSTM(3, 3)]
)
def test_it_is_printed(build, wrap_model):
    network = nn.Sequential(build(), nn.Linear(3, 2))
    kind, shown = type(network[0]).__name__, repr(network)
    _, model, optimizer, *_ = made(wrap_model, network)
    assert f"{kind}(" in repr(model)
    assert "Linear(in_features=3, out_features=2, bias=True)" in repr(model)
    optimizer.model.to_standard_module()
    assert repr(network) == shown


def test_a_wrapper_of_a_private_network_is_refused():
    network = Network()
    made(False, network)
    with pytest.raises(RuntimeError, match="would wrap a private model"):
        wrap("ddp_bucketed", network)
    with pytest.raises(RuntimeError, match="would wrap a private model"):
        wrap("none", Holder(network))


def test_compiled_before_it_is_run_as_compiled():
    network = Plain()
    network.compile(backend="eager")
    _, *private = made(False, network)
    train(*private)
    private[1].model.to_standard_module()
    assert private[0]._compiled_call_impl is not None
    torch.compiler.reset()


def test_compiled_afterwards_no_step_is_private_and_none_is_taken():
    _, model, optimizer, criterion, _ = made(False)
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"private model's forward.*compile it before make_pri"):
        criterion(model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a forward after model.eval\(\) or model.compile\(\)"):
        optimizer.step()
    torch.compiler.reset()


def test_sharded_afterwards_it_is_refused_in_the_step(one_rank):
    network = Plain()
    _, model, *_ = made(False, network)
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="would wrap a private model"):
        model(torch.ones(2, 3))


def test_a_wrapper_of_the_users_comes_back_too(one_rank):
    network = Network()
    wrapper = wrap("none", network)
    _, model, *private = made(False, network, module=wrapper)
    assert model is wrapper
    train(model, *private)
    assert private[0].steps == 6
