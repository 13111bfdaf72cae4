"""State of a captured layer: its private step, where its samples are, and how it is used."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.clipping.accumulation import autocast_of
from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.batch_layout import (
    Layout,
    LayoutUnknown,
    all_tokens,
    bag_tensors,
    check_size,
    expand_shared,
    first_tokens,
)
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import apply_directly, transforms_run, tree_leaves, tree_map
from dp_clipping.trials.holders import holding, lists_in

FIRST = Layout()  # samples are counted by the first dimension
OWN = ("weight", "bias")


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
        is_recurrent: it is of a recurrent layer, whose precision of float32 PyTorch sets apart.
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
    is_recurrent: bool = False
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
        self, private_step: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None
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
        if record.joint is None and record not in private_step.used:
            if torch.is_grad_enabled():
                private_step.used.add(record)
            trigger = record.trigger
        else:
            trigger = private_step.trigger(record)
        bias = None if bias is None else bias.detach()
        return site.run(x, weight.detach(), bias, trigger, None, (site, private_step, site.options))

    # `torch.compile` counts by code how often it compiles anew: each kind has code of its own.
    forward.__code__ = forward.__code__.replace(co_name=f"{kind}_forward")
    return forward


class LayerState:
    """State of one captured module, at `module._private`.

    Attributes:
        name: the name of the module in the network.
        kind: the name of its kind of layers (`capture.layer_kinds`).
        learns_outputs, is_linear: of the kind.
        children_apart: of a vectorized module: its child layers are captured themselves.
        inner: the layer that its class is derived from, if that is what is captured (`inner_call`);
            `inner_forward` runs it in a step.
        watch: takes calls of `inner` in a plain forward (`capture.network.Watch`); or None.
        whole_because: why it cannot run on the whole batch, and what to do; or "".
        is_unseen: it has called operators there that the search before had not seen.
        is_misfit: `inner` is set, and it has computed with its parameters otherwise.
        varies: not each of its calls returns as many tensors: see `plain_forward`.
        flattened: its inputs with flattened samples in a forward of the search.
        sought: how many of them a search has looked for.
        calls: how many of them there were so far, in the forward that runs.
        records: name, relative to the module -> the parameter, of all that it captures;
            `trainable` has the names.
        has_last: for a bag: its offsets end with the number of ids.
        products: for a registered layer: shapes of a sample -> the parameters for which its
            function returns products at these shapes.
        operations: of a vectorized module that runs on the whole batch (`vmap.whole_batch`): the
            operators of its own parameters; None: it runs under vmap with its child layers.
        one_by_one: why its samples run one after another; "": they run together.
        own_forward: a forward that the module had in place of its class's; None: it had none.
        private_step: the private step that its calls belong to; None: it runs without privacy.
        sites: dimensions, dtype and autocast dtype of an input -> how the layer is used so; and
            the arguments of `site` -> the site. A recurrent layer keeps lists of its own there.
            They are dropped when samples are looked for again.
        slots: name -> the dense slot of this private step.
        layouts: number of dimensions of each input -> their layouts.
    """

    def __init__(self, name: str, kind: str, module: nn.Module, records: dict[str, Trainable]):
        self.name, self.kind, self.records = name, kind, records
        self.trainable = tuple(records)
        self.has_last = bool(getattr(module, "include_last_offset", False))
        before = vars(module).get("_private")  # of an earlier private model, which is not its own
        self.own_forward: Callable[..., Any] | None = (
            vars(module).get("forward") if before is None else before.own_forward
        )
        self.private_step: Any = None
        self.sites: dict[tuple, Any] = {}
        self.slots: dict[str, Tensor] = {}
        self.layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        self.output_layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        self.children_apart = self.learns_outputs = self.is_linear = False
        self.inner: Any = None
        self.inner_forward: Callable[..., Any] | None = None
        self.watch: Callable[..., Any] | None = None
        self.whole_because = self.one_by_one = ""
        self.is_unseen = self.is_misfit = self.varies = False
        self.flattened = self.sought = self.calls = 0
        self.products: dict[tuple, dict[str, tuple[int, torch.dtype]]] = {}
        self.operations: dict[Any, Any] | None = {}

    def title(self, module: nn.Module) -> str:
        """Returns the name of the module and of its class, for messages."""
        return f"{self.name or 'the network'} ({type(module).__name__})"

    def tensors(self, tree: Any, whole: bool = False) -> list[Tensor]:
        """Returns the tensors of a call, or of what it returns, in which samples are looked for.

        Packed sequences, and bags with offsets, have no dimension for the samples. Tensors that
        have one take their place, with all that belongs to a sample if `whole`.

        Args:
            tree: positional and keyword arguments, or an output.
        """
        if self.kind == "embedding_bag" and not isinstance(tree, Tensor):
            return bag_tensors(*tree, has_last=self.has_last, whole=whole)
        if self.kind != "recurrent":
            return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        of_packed = all_tokens if whole else first_tokens
        leaves = tree_leaves(tree, is_leaf=lambda x: isinstance(x, PackedSequence))
        leaves = [of_packed(x) if isinstance(x, PackedSequence) else x for x in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def slot(self, name: str) -> Tensor | None:
        """Returns the slot at which G of this parameter arrives; None for a frozen parameter."""
        if name not in self.records:
            return None
        if name not in self.slots:
            self.slots[name] = self.private_step.slot(self.records[name])
        return self.slots[name]

    def site(
        self, function: type[torch.autograd.Function], x: Tensor, layout: Layout,
        names: tuple[str, str] = OWN, **more: Any,
    ) -> Site:  # fmt: skip
        """Returns the site of a use of the parameters with these names; a new one with `more`."""
        cast = autocast_of(x)
        key = (function, names, layout.kind, layout.dim, cast)
        site: Site | None = None if more else self.sites.get(key)
        if site is None:
            is_first = layout.kind == "dimension" and not layout.dim
            weight, bias = map(self.records.get, names)
            site = Site(function, weight, bias, None if is_first else layout, cast, **more)
            if not more:
                self.sites[key] = site
        return site

    def run(
        self, function: type[torch.autograd.Function], layer: nn.Module, x: Tensor, layout: Layout,
        weight: Tensor, bias: Tensor | None, options: Any, reads: Callable[[Any], Any],
        given: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the output of a layer, which it keeps a site for; or its output in compiled code.

        There the function gets slots, at which G arrives, and where the samples are.

        Args:
            options: what the function needs; it follows from what `reads` reads of the layer.
            given: the input that the layer was called with, if later calls may read the site.
        """
        if torch.compiler.is_compiling():
            bias = None if bias is None else bias.detach()
            place = (layout.kind, layout.dim, self.private_step.batch_size)
            slots = self.slot("weight"), self.slot("bias")
            return function.apply(x, weight.detach(), bias, *slots, (None, place, options))
        site = self.site(function, x, layout, options=options, settings=reads(layer), reads=reads)
        if given is not None:
            self.keep(given, site)
        return site.use(self.private_step, x, weight, bias)

    def pictures(self, x: Tensor) -> tuple[Tensor, Layout, Callable[[Tensor], Tensor]]:
        """Returns an input as [N, ..], its layout, and what gives an output the input's layout.

        N is a multiple of B where samples have several pictures each.
        """
        layout, x = self.batched(x)
        rows = layout.batch_first(x, self.private_step.batch_size)
        if rows.ndim == x.ndim:
            return rows, layout, layout.restore
        split = rows.shape[:2]
        return rows.flatten(0, 1), layout, lambda y: layout.restore(y.unflatten(0, split))

    def keep(self, x: Tensor, site: Site) -> None:
        """Keeps a site for later calls with such an input, if its rows are as the network's."""
        layout = site.layout or FIRST
        if layout.kind == "dimension" and self.layouts.get((x.ndim,)) == (layout,):
            self.sites[x.ndim, x.dtype, autocast_of(x)] = site

    def unseen(self, error: Exception) -> LayoutUnknown:
        """Returns the error for operators on the whole batch that no search has seen.

        Another search looks for them, as where code leaves out a mask that hides nothing. If they
        are not found, the one after it lets the module run under vmap.
        """
        if self.is_unseen:
            self.whole_because = f"{error}: compute with its parameters in a module of their own"
        self.is_unseen = True
        return LayoutUnknown(self.name)

    def layouts_of(
        self, inputs: list[Tensor], batch_size: int | None = None, of_units: bool = True
    ) -> tuple[Layout, ...]:
        """Returns the layouts of a call's inputs, which have rows of so many samples.

        Args:
            batch_size: None: the private step's.
            of_units: or of the single examples of each.

        Raises:
            ValueError: one has other rows.
        """
        found = self.layouts.get(tuple([x.ndim for x in inputs]))
        if found is None:
            raise LayoutUnknown(self.name)
        found = self._of_units(found) if of_units else found
        batch_size = self.private_step.batch_size if batch_size is None else batch_size
        for x, layout in zip(inputs, found, strict=True):
            check_size(x, layout, self, batch_size)
        return found

    def own(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the parameters that the module captures, as its code has them."""
        return {name: getattr(*owner_of(module, name)) for name in self.trainable}

    def copies(self, module: nn.Module, batch_size: int) -> dict[str, Tensor]:
        """Returns the same without a graph, expanded to the batch."""
        return {n: p.detach().expand(batch_size, *p.shape) for n, p in self.own(module).items()}

    def seen(self, inputs: list[Tensor]) -> tuple[Layout, ...]:
        """Returns the layouts of a call's inputs, or none where they are not known yet."""
        return self.layouts.get(tuple([x.dim() for x in inputs]), ())

    def seen_outputs(self, inputs: list[Tensor]) -> tuple[Layout, ...]:
        """Returns the layouts of the outputs of a call with these inputs, as `seen` does."""
        return self.output_layouts.get(tuple([x.dim() for x in inputs]), ())

    def output_layouts_of(self, inputs: list[Tensor], of_units: bool = True) -> tuple[Layout, ...]:
        """Returns the layouts of the outputs of a call with these inputs."""
        found = self.output_layouts[tuple([x.ndim for x in inputs])]
        return self._of_units(found) if of_units else found

    def _of_units(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Returns the layouts of a private step's samples, from the layouts of examples."""
        if self.examples_per_unit == 1:
            return layouts
        return tuple(layout.of_units(self.name) for layout in layouts)

    @property
    def rows(self) -> int:
        """Returns the number of rows of an input with a row for each example."""
        return self.private_step.batch_size * self.examples_per_unit

    @property
    def layout_of_rows(self) -> Layout:
        """Returns the layout of an input with a row for each example."""
        return self._of_units((FIRST,))[0]

    @property
    def examples_per_unit(self) -> int:
        """Returns the number of rows of the network's inputs per sample of the private step."""
        return 1 if self.private_step is None else self.private_step.examples_per_unit

    def batched(self, x: Tensor) -> tuple[Layout, Tensor]:
        """Returns the layout of the only input, which gets a batch dimension if it has none.

        A layer that reads the same values for every sample ([1, T] or [T] position ids) has one
        output gradient for all of them, in which the samples are added up already. With the input
        expanded to the batch, broadcasting does downstream what it did before.
        """
        found = self.layouts.get((x.ndim,))
        if found is None:
            raise LayoutUnknown(self.name)
        (layout,) = found if self.private_step.examples_per_unit == 1 else self._of_units(found)
        if layout.kind == "dimension" and x.shape[layout.dim] == self.private_step.batch_size:
            return layout, x
        check_size(x, layout, self, self.private_step.batch_size)
        if layout.kind == "shared":
            return self.layout_of_rows, expand_shared(x, self.rows)
        return layout, x


def plain_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module's own forward, or its class's; lists are empty in steps if it `varies`."""
    handle: LayerState = vars(module)["_private"]
    own, is_looked_at = handle.own_forward, (handle.private_step or handle.watch) is not None
    y = type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)
    return holding(y, lists_in(y)) if handle.varies and is_looked_at else y


def expanded_input(
    handle: LayerState, inputs: list[Tensor], args: tuple, kwargs: dict, batch_size: int
) -> tuple[tuple, dict]:
    """Returns a layer's arguments, with a shared input expanded to the batch."""
    layouts = () if handle.learns_outputs else handle.seen(inputs)
    if layouts and layouts[0].kind == "shared":
        return (expand_shared(inputs[0], batch_size),), {}
    return args, kwargs


def expanded_output(handle: LayerState, inputs: list[Tensor], output: Any, batch_size: int) -> Any:
    """Returns an output of a vectorized module whose shared tensors are expanded to the batch."""
    layouts = handle.seen_outputs(inputs) if handle.kind == "vectorized" else ()
    if not any([x.kind == "shared" for x in layouts]):
        return output
    places = iter(layouts)

    def expanded(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        layout = next(places, None)
        is_shared = layout is not None and layout.kind == "shared"
        return expand_shared(y, batch_size) if is_shared else y

    return tree_map(expanded, output)
