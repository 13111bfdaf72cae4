"""One way in which a layer is used in private steps, and the forward that reads it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.recorder import Recorder, Trainable
from dp_clipping.torch_compat import apply_directly, transforms_run

# What arrives at the slots of a layer in a compiled region: see linear.py, embedding/module.py.
GRADIENT_SLOTS = ("gradient", "squares", "count")
FACTOR_SLOTS = ("y", "a", "count")
LOOK_UP_SLOTS = ("y", "ids", "count")
CHANGED = (
    "than in the plain forward that was made for network inputs of these shapes: a compiled layer "
    "must be known beforehand; if the network has changed call model.reset_batch_layouts(), if it "
    "depends on its inputs' values do not compile it"
)

FIRST = Layout()  # samples are counted by the first dimension


@dataclass(eq=False, slots=True)
class Site:
    """One way in which a layer is used in private steps: what is asked once.

    Attributes:
        function: runs the layer: `apply(x, weight, bias, trigger, None, (site, private step,
            options))`.
        weight, bias: the trainable parameters; None for one that is frozen or not there.
        layout: where samples are in its input and output; None: in the first dimension.
        cast: the dtype that autocast gives its operands; None: it leaves them.
        transposed: the weight is [p, d].
        options: what else the function needs.
        settings: what they follow from, as `reads` reads it of the module.
        records: the trainable ones of weight and bias.
        planned: the weight, if the step plans what becomes of its factors.
        run: the function, without PyTorch's look at each argument.
    """

    function: type[torch.autograd.Function]
    weight: Trainable | None
    bias: Trainable | None = None
    layout: Layout | None = None
    cast: torch.dtype | None = None
    transposed: bool = False
    options: Any = None
    settings: Any = None
    reads: Callable[[Any], Any] | None = None
    records: tuple[Trainable, ...] = ()
    planned: Trainable | None = None
    run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        weight = self.weight
        self.records = tuple([one for one in (weight, self.bias) if one is not None])
        is_planned = weight is not None and (weight.joint is None or weight in weight.joint.linear)
        self.planned = weight if is_planned else None
        self.run = apply_directly(self.function)

    def tokens(self, y: Tensor, a: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """Returns output gradients and inputs [.., features] as [B, T, features]."""
        if self.layout is None and y.ndim == a.ndim == 2 and y.shape[0] == batch_size:
            return y[:, None], a[:, None]
        layout = self.layout or FIRST
        return layout.batch_tokens(y, batch_size), layout.batch_tokens(a, batch_size)

    def use(
        self, private_step: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Runs the layer's function with these parameters."""
        trigger = private_step.trigger(self.records[0]) if self.records else None
        bias = None if bias is None else bias.detach()
        run = self.function.apply if transforms_run() else self.run
        return run(x, weight.detach(), bias, trigger, None, (self, private_step, self.options))


def forward_of(kind: str, first_call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of a kind of layers, which reads a layer's site where it has one.

    Args:
        first_call: (module, its state, input, ..) -> output, of any other call in a private step.
    """

    def forward(self: nn.Module, x: Tensor, *others: Any, **named: Any) -> Any:
        handle: Any = self._private
        private_step = handle.private_step
        if private_step is None:
            return type(self).forward(self, x, *others, **named)
        if private_step.is_compiled or others or named or type(x) is not Tensor:
            return first_call(self, handle, x, *others, **named)
        device, dtype = x.device.type, x.dtype
        is_cast = torch.is_autocast_enabled(device) and dtype != torch.float64
        cast = torch.get_autocast_dtype(device) if is_cast else None
        site: Site | None = handle.sites.get((x.ndim, dtype, cast))
        if (
            site is None
            or x.shape[0 if site.layout is None else site.layout.dim] != private_step.batch_size
            or (site.reads is not None and site.reads(self) != site.settings)
            or transforms_run()
        ):
            return first_call(self, handle, x)
        own, parameters = self.__dict__, self._parameters
        weight = own["weight"] if "weight" in own else parameters["weight"]  # FSDP1 lays it over
        bias = own["bias"] if "bias" in own else parameters.get("bias")
        record = site.records[0]
        trigger = record.trigger if record.joint is None else private_step.trigger(record)
        bias = None if bias is None else bias.detach()
        return site.run(x, weight.detach(), bias, trigger, None, (site, private_step, site.options))

    # `torch.compile` counts by code how often it compiles anew: each kind has code of its own.
    forward.__code__ = forward.__code__.replace(co_name=f"{kind}_forward")
    return forward


def autocast_of(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast gives operands of a matrix product of x; None: their own."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a matrix product of x, as autocast has it."""
    return autocast_of(x) or x.dtype


def autocast_operands(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Returns the operands as autocast would make them for a matrix product."""
    dtype = autocast_of(x)
    if dtype is None:
        return (x, *parameters)
    return tuple(None if t is None else t.to(dtype) for t in (x, *parameters))


def norm_operands(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Returns the operands as autocast would make them for a normalisation: float32 on a GPU."""
    if not x.is_cuda or not torch.is_autocast_enabled("cuda"):
        return (x, *parameters)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(None if t is None else t.to(dtype) for t in (x, *parameters))
