"""docs/from_opacus.md has a row for each public name of Opacus, and what the rows say is so."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping import BatchMemoryManager, PrivacyEngine
from tests.support.engine import CLASSES, build, data, step
from tests.support.engine import arguments as given

PAGE = Path(__file__).parents[1] / "docs/from_opacus.md"
STATES = ("same", "keep", "apart", "other", "refused", "inside")
ARGUMENTS_OF = "PrivacyEngine.", "BatchMemoryManager"
MODEL, OPTIMIZER, LOSS = "AbstractGradSampleModule", "DPOptimizer", "DPTensorFastGradientClipping"
pytestmark = pytest.mark.filterwarnings("ignore")


def read_rows() -> dict[tuple[str, str], str]:
    """Returns (heading, name) -> what the page says of it."""
    rows, headings = {}, []
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            headings = re.findall(r"`([^`]+)`", line)
        elif line.startswith("| `") and headings:
            names, *others = line.strip("|").split(" | ")
            state = next(cell.strip() for cell in others if cell.strip() in STATES)
            rows |= {(h, n): state for h in headings for n in re.findall(r"`([^`]+)`", names)}
    return rows


ROWS = read_rows()


def public(owner: object) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


def modules() -> list:
    found = [m.name for m in pkgutil.walk_packages(opacus.__path__, "opacus.")]
    return [importlib.import_module(m) for m in found if ".tests" not in m]


def names() -> list[tuple[str, str, object]]:
    """Returns (module, name, object) of all that Opacus defines."""
    return [
        (module.__name__, name, value)
        for module in modules()
        for name, value in public(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]


NAMES = names()


def state_of(module: str, name: str) -> str | None:
    """Returns what a table of the module, or of a package that it is in, says."""
    headings = (".".join(module.split(".")[:n]) for n in range(module.count(".") + 1, 0, -1))
    return next((ROWS[h, name] for h in headings if (h, name) in ROWS), None)


def test_every_name_has_a_row():
    found = {name for _, name, _ in NAMES}
    assert {"PrivacyEngine", "DPOptimizer", "DPLSTM", "DPLightningDataModule"} <= found
    assert len(NAMES) > 150
    missing = [f"{module}.{name}" for module, name, _ in NAMES if not state_of(module, name)]
    assert not missing


def test_every_member_has_a_row():
    """Of classes that programs use through the engine; others are used as they are, or not."""
    missing = []
    for module, name, value in NAMES:
        if not inspect.isclass(value) or state_of(module, name) in ("keep", "apart", "other"):
            continue
        if module.endswith((".data_loader", ".distributed", ".dp_rnn", ".param_rename")):
            continue  # refused, or built from, as a whole
        if module.endswith(("per_sample_gradients_utils", "uniform_sampler")):
            continue
        family = [c.__name__ for c in value.__mro__]
        family += [a.replace("Adaptive", "Gradient") for a in family if "Adaptive" in a]
        missing += [
            f"{name}.{member}"
            for member in public(value)
            if not any((c, member) in ROWS for c in family)
        ]
    assert not missing


def arguments() -> list[tuple[str, str]]:
    from opacus.utils.batch_memory_manager import BatchMemoryManager as Theirs

    engine = opacus.PrivacyEngine
    calls = {f"PrivacyEngine.{n}": f for n, f in public(engine).items()}
    calls |= {"PrivacyEngine.__init__": engine.__init__, "BatchMemoryManager": Theirs.__init__}
    return [
        (call, argument)
        for call, function in calls.items()
        for argument in inspect.signature(getattr(function, "__func__", function)).parameters
        if argument not in ("self", "cls")
    ]


def test_every_argument_and_mode_has_a_row_and_no_row_is_of_a_name_that_is_gone():
    assert len(arguments()) > 50
    assert not [pair for pair in arguments() if pair not in ROWS]
    from opacus.grad_sample import utils

    source = inspect.getsource(utils.get_gsm_class) + inspect.getsource(utils.get_hooks_class)
    modes = set(re.findall(r'(?:== |\[|, )"(\w+)"', source))
    assert modes >= {"hooks", "ew", "ghost"}
    assert {name for heading, name in ROWS if heading == "grad_sample_mode"} == modes
    known = {name for _, name, _ in NAMES} | {argument for _, argument in arguments()}
    known |= {m for _, _, value in NAMES if inspect.isclass(value) for m in public(value)}
    known |= {name for heading, name in ROWS if heading == "grad_sample_mode"}
    assert not {name for _, name in ROWS} - known


def epoch(run: SimpleNamespace, loader: DataLoader | None = None) -> int:
    """Takes the steps of an epoch; returns how many there were."""
    for batch in loader or run.loader:
        step(run, batch)
    return run.optimizer.steps


@pytest.fixture(scope="module")
def run() -> SimpleNamespace:
    """What `make_private` returns, after a backward."""
    run = build()
    x, y = run.loader.dataset[:4]
    run.loss = run.criterion(run.model(x), y)
    run.loss.backward()
    return run


LIVE = {MODEL: "model", OPTIMIZER: "optimizer", LOSS: "loss", "PrivacyEngine": "engine"}


@pytest.mark.parametrize(("heading", "name"), [r for r in ROWS if r[0] in LIVE])
def test_members(run, heading, name):
    owner = getattr(run, LIVE[heading])
    if ROWS[heading, name] == "same":
        assert hasattr(owner, name)
        return
    assert ROWS[heading, name] == "refused"
    with pytest.raises(AttributeError, match=name):
        getattr(owner, name)


TRIED = "make_private", "make_private_with_epsilon"


@pytest.mark.parametrize("method", TRIED)
def test_arguments_of_make_private_are_accepted(method):
    """With the defaults that they have in Opacus, and what Opacus wants to be given."""
    call = f"PrivacyEngine.{method}"
    theirs = inspect.signature(getattr(opacus.PrivacyEngine, method)).parameters
    values = given(criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost")
    values |= {"target_epsilon": 5.0, "target_delta": 1e-3, "epochs": 2}
    same = [argument for argument in theirs if ROWS.get((call, argument)) == "same"]
    assert len(same) > 12
    arguments = {a: values.get(a, theirs[a].default) for a in same if a != "kwargs"}
    if "kwargs" in same:
        arguments |= {"epsilon_tolerance": 0.1, "alphas": [2.0, 8.0, 32.0]}
    assert len(getattr(PrivacyEngine(accountant="rdp"), method)(**arguments)) == 4


def test_arguments_of_the_other_methods_are_there():
    """Their own tests call them; names are what a program written for Opacus gives."""
    for call, argument in ROWS:
        method = call.partition(".")[2]
        if method in TRIED:
            continue
        if call.startswith(ARGUMENTS_OF) and ROWS[call, argument] == "same":
            owner = BatchMemoryManager if call == "BatchMemoryManager" else PrivacyEngine
            function = getattr(owner, method or "__init__")
            assert argument in inspect.signature(function).parameters, (call, argument)


@pytest.mark.parametrize("mode", [n for h, n in ROWS if h == "grad_sample_mode"])
def test_modes(mode):
    if ROWS["grad_sample_mode", mode] == "same":
        assert len(PrivacyEngine().make_private(**given(grad_sample_mode=mode))) == 4
        return
    with pytest.raises(ValueError, match=f"'{mode}' is unknown: .*from_opacus.md"):
        PrivacyEngine().make_private(**given(grad_sample_mode=mode))


def scheduler(name: str):
    def trial():
        run, schedulers = build(max_grad_norm=1.0), importlib.import_module("opacus.schedulers")
        options = {
            "Exponential": {"gamma": 0.5}, "Step": {"step_size": 1, "gamma": 0.5},
            "Lambda": {"noise_lambda" if "Noise" in name else "scheduler_function": lambda _: 0.5},
        }  # fmt: skip
        (given,) = (value for kind, value in options.items() if name.startswith(kind))
        getattr(schedulers, name)(run.optimizer, **given).step()
        changed = "noise_multiplier" if "Noise" in name else "max_grad_norm"
        assert getattr(run.optimizer, changed) == 0.5
        epoch(run)

    return trial


def accountant(name: str):
    def trial():
        run = build()
        run.engine.accountant = getattr(importlib.import_module("opacus.accountants"), name)()
        epoch(run)
        assert run.engine.get_epsilon(delta=1e-3) > 0

    return trial


def registered() -> None:
    from opacus.accountants import RDPAccountant, create_accountant, register_accountant
    from opacus.accountants.registry import _ACCOUNTANTS

    class Own(RDPAccountant):
        @classmethod
        def mechanism(cls) -> str:
            return "own"

    register_accountant("own", Own)
    try:
        assert isinstance(create_accountant("own"), Own)
        assert isinstance(PrivacyEngine(accountant="own").accountant, Own)
    finally:
        del _ACCOUNTANTS["own"]


class Sequence(nn.Module):
    """samples [B, 4] -> logits [B, 3], through a layer of sequences."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x):
        x = x.unsqueeze(0).expand(3, -1, -1)  # [tokens, B, 4]
        x = self.layer(x, x, x) if hasattr(self.layer, "qlinear") else self.layer(x)
        return self.head((x if isinstance(x, torch.Tensor) else x[0]).mean(0))


def layer(name: str, *sizes: int):
    def trial():
        made = getattr(importlib.import_module("opacus.layers"), name)(*sizes)
        width = 5 if name in ("DPLSTM", "DPGRU", "DPRNN") else 4
        run = build(module=Sequence(made, width))
        x, y = run.loader.dataset[:6]
        check = run.engine.check(run.model, (x, y))
        assert check.ok, str(check)
        epoch(run)

    return trial


def split() -> None:
    from opacus.utils.batch_memory_manager import wrap_data_loader

    run = build()
    pieces = wrap_data_loader(data_loader=run.loader, max_batch_size=3, optimizer=run.optimizer)
    assert epoch(run, pieces) == len(run.loader)


def fixed() -> None:
    from opacus.validators import ModuleValidator

    net = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (4, 1)), nn.BatchNorm1d(4), nn.Flatten())
    epoch(build(module=nn.Sequential(ModuleValidator.fix(net), nn.Linear(4, CLASSES))))


class Odd(nn.Linear):
    """A layer that has a validator and a fixer of its own."""


def own_fix() -> None:
    from opacus.validators import ModuleValidator, register_module_fixer, register_module_validator

    register_module_validator([Odd])(lambda module: [ValueError("odd")])
    register_module_fixer([Odd])(lambda module, **_: nn.Linear(4, CLASSES))
    try:
        assert not ModuleValidator.is_valid(Odd(4, CLASSES))
        assert (
            type(PrivacyEngine.get_compatible_module(nn.Sequential(Odd(4, CLASSES)))[0])
            is nn.Linear
        )
    finally:
        del ModuleValidator.VALIDATORS[Odd], ModuleValidator.FIXERS[Odd]


TRIALS = {
    **{name: scheduler(name) for name in (
        "ExponentialNoise", "LambdaNoise", "StepNoise", "ExponentialGradClip", "LambdaGradClip",
        "StepGradClip",
    )},
    **{name: accountant(name) for name in ("GaussianAccountant", "RDPAccountant", "PRVAccountant")},
    "IAccountant": registered, "create_accountant": registered, "register_accountant": registered,
    **{name: layer(name, 4, 5) for name in ("DPLSTM", "DPGRU", "DPRNN")},
    "DPMultiheadAttention": layer("DPMultiheadAttention", 4, 2),
    "SequenceBias": layer("SequenceBias", 4),
    "wrap_data_loader": split,
    "ModuleValidator": fixed,
    "register_module_validator": own_fix, "register_module_fixer": own_fix,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for (_, name), state in ROWS.items() if state == "keep"])
def test_what_is_kept_works_with_ours(name):
    torch.manual_seed(0)
    TRIALS[name]()


def test_same_names_can_be_imported():
    package = importlib.import_module("dp_clipping")
    for (heading, name), state in ROWS.items():
        if heading.startswith("opacus.") and state == "same":
            assert getattr(package, name)


def test_the_layers_of_opacus_are_refused_where_the_page_says_so():
    from opacus.data_loader import DPDataLoader
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    net = nn.Linear(4, CLASSES)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    dp = DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
    samples = data()
    sampler = UniformWithReplacementSampler(num_samples=len(samples), sample_rate=0.1)
    theirs = opacus.PrivacyEngine()
    ghost = theirs.make_private(**given(grad_sample_mode="ghost"), criterion=nn.CrossEntropyLoss())
    hooked = nn.Linear(4, CLASSES)
    hooks, *_ = theirs.make_private(**given(module=hooked, wrap_model=False))
    for says, wrong in {
        r"its module\.to_standard_module\(\)": {"module": GradSampleModule(nn.Linear(4, CLASSES))},
        r"call cleanup\(\) of": {"module": hooked},
        r"give optimizer\.original_optimizer": {"module": net, "optimizer": dp},
        r"give criterion\.criterion": {"criterion": ghost[2]},
        r"\(DPDataLoader\): it does Poisson": {"data_loader": ghost[3]},
        "does not visit each": {"data_loader": DataLoader(samples, batch_sampler=sampler)},
    }.items():  # fmt: skip
        assert isinstance(ghost[3], DPDataLoader)
        with pytest.raises(ValueError, match=says):
            PrivacyEngine().make_private(**given() | wrong)
    hooks.cleanup()
    epoch(build(module=hooked))
