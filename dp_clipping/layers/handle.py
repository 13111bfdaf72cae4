"""State of a captured layer: its private step, and where its samples are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.layers.batch_layout import Layout, all_tokens, bag_tensors, first_tokens
from dp_clipping.layers.recorder import Recorder, Trainable
from dp_clipping.layers.site import FIRST, Site, autocast_of
from dp_clipping.layers.tensor_parallel import refuse_distributed, settled
from dp_clipping.torch_compat import tree_leaves, tree_map
from dp_clipping.trials.schedule import Schedule

OWN = ("weight", "bias")


class LayoutUnknown(Exception):
    """A layer was called in a way that the search for the batch dimension has not seen.

    Attributes:
        arguments: of the forward, where it is not that of the user's batch.
    """

    arguments: tuple[tuple, dict] | None = None


class NeedsVmap(ValueError):
    """A layer has no per-sample gradients as it is called; it may where its caller is under vmap.

    Attributes:
        layers: its name, and those of other such layers.
    """

    def __init__(self, layer: str, message: str):
        super().__init__(message)
        self.layers = {layer}


class CalledDifferently(ValueError):
    """A layer is called with other tensors for some samples than for others."""

    def __init__(self, layer: str):
        super().__init__(
            f"{layer} is called with more tensors for some samples than for others (a mask that is "
            "left out where nothing is padded, for example), so where its samples are cannot be "
            "established: call it alike for all samples, or give a first batch in which more "
            "samples are padded"
        )


def rows_unknown(layer: str) -> NeedsVmap:
    """Returns the error of a module whose rows are those of a batch that it was not given."""
    return NeedsVmap(
        layer,
        f"{layer or 'the network'} returns rows for each sample, and none of its arguments has "
        "them: give it a tensor with a row for each sample, as x in place of len(x)",
    )


class LayerState:
    """State of one captured module, at `module._private`.

    Attributes:
        name: the name of the module in the network.
        kind: the name of its kind of layers (`capture.layer_kinds`).
        learns_outputs, is_linear: of the kind.
        children_apart: of a vectorized module: its child layers are captured themselves.
        trial: takes a call of a vectorized module in a plain forward that tries it; or None.
        inner: the layer that its class is derived from, if that is what is captured (`inner_call`);
            `inner_forward` runs it.
        around: functions called before and after its calls now, where `inner` is set.
        whole_because: why it cannot run on the whole batch, and what to do; or "".
        is_unseen: it has called operators there that the search before had not seen.
        is_misfit: `inner` is set, and it has computed with its parameters otherwise.
        records: name, relative to the module -> the parameter, of all that it captures;
            `trainable` has the names.
        has_last: for a bag: its offsets end with the number of ids.
        schedule: for a registered layer: of the comparisons of its function with single samples.
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
        self.private_step: Recorder | None = None
        self.sites: dict[tuple, Any] = {}
        self.slots: dict[str, Tensor] = {}
        self.layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        self.output_layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        self.children_apart = self.learns_outputs = self.is_linear = False
        self.trial: Callable[..., Any] | None = None
        self.inner: Any = None
        self.inner_forward: Callable[..., Any] | None = None
        self.around: tuple[Callable[..., Any], Callable[..., Any] | None] | None = None
        self.whole_because, self.is_unseen, self.is_misfit = "", False, False
        self.schedule = Schedule()
        self.products: dict[tuple, dict[str, tuple[int, torch.dtype]]] = {}
        self.operations: dict[Any, Any] | None = {}
        self.one_by_one = ""

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
        self,
        function: type[torch.autograd.Function],
        x: Tensor,
        layout: Layout,
        names: tuple[str, str] = OWN,
        **more: Any,
    ) -> Site:
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
        self,
        function: type[torch.autograd.Function],
        layer: nn.Module,
        x: Tensor,
        layout: Layout,
        weight: Tensor,
        bias: Tensor | None,
        options: Any,
        reads: Callable[[Any], Any],
        given: Tensor | None = None,
    ) -> Tensor:
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

    def pictures(
        self, x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, Layout, Callable[[Tensor], Tensor]]:
        """Returns an input as [N, ..], its layout, and what gives an output the input's layout.

        N is a multiple of B where samples have several pictures each.
        """
        refuse_distributed(self, x, *parameters)
        layout, x = self.batched(settled(x))
        rows = layout.batch_first(x, self.private_step.batch_size)
        if rows.ndim == x.ndim:
            return rows, layout, layout.restore
        split = rows.shape[:2]
        return rows.flatten(0, 1), layout, lambda y: layout.restore(y.unflatten(0, split))

    def keep(self, x: Tensor, site: Site) -> None:
        """Keeps a site for later calls with such an input, if it is as in the network's batch.

        Those have the samples where this one has them, a row for each.
        """
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

    def layouts_of(self, inputs: list[Tensor]) -> tuple[Layout, ...]:
        found = self.layouts.get(tuple([x.ndim for x in inputs]))
        if found is None:
            raise LayoutUnknown(self.name)
        return self._of_units(found)

    def output_layouts_of(self, inputs: list[Tensor]) -> tuple[Layout, ...]:
        """Returns the layouts of the outputs of a call with these inputs."""
        return self._of_units(self.output_layouts[tuple(x.dim() for x in inputs)])

    def layouts_of_examples(
        self, inputs: list[Tensor]
    ) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Returns the layouts of inputs and outputs of a call, of single examples of each unit."""
        dims = tuple(x.dim() for x in inputs)
        if dims not in self.layouts:
            raise LayoutUnknown(self.name)
        return self.layouts[dims], self.output_layouts[dims]

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
        return self._of_units((Layout(),))[0]

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
    """Calls the forward that a captured module has of its own, or its class's."""
    own = vars(module)["_private"].own_forward
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def expand_shared(x: Tensor, batch_size: int) -> Tensor:
    """Returns x [1, ..] as [B, ..]; anything else gets a new first dimension."""
    x = x if x.dim() > 1 and x.shape[0] == 1 else x.unsqueeze(0)
    return x.expand(batch_size, *x.shape[1:])


def expanded_input(
    handle: LayerState, layouts: Sequence[Layout], inputs: list[Tensor], batch_size: int
) -> tuple[tuple, dict] | None:
    """Returns a layer's arguments with a shared input expanded to the batch; None if it has none.

    A forward pre-hook returns this.
    """
    if not handle.learns_outputs and layouts and layouts[0].kind == "shared":
        return (expand_shared(inputs[0], batch_size),), {}
    return None


def expanded_output(
    handle: LayerState, layouts: Sequence[Layout], output: Any, batch_size: int
) -> Any:
    """Returns an output of a vectorized module whose shared tensors are expanded to the batch."""
    if handle.kind != "vectorized" or not any(x.kind == "shared" for x in layouts):
        return output
    places = iter(layouts)

    def expanded(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        layout = next(places, None)
        is_shared = layout is not None and layout.kind == "shared"
        return expand_shared(y, batch_size) if is_shared else y

    return tree_map(expanded, output)


def has_rows(x: Tensor, layout: Layout, handle: LayerState, batch_size: int) -> bool:
    """Returns whether a tensor has the rows of every sample where the layout says."""
    if layout.kind == "shared":
        return not layout.dim or x.shape[0] == 1
    if x.dim() <= layout.dim:
        return False
    if layout.kind == "unit":
        return x.shape[layout.dim] == batch_size * handle.examples_per_unit
    if layout.kind in ("sample_major", "time_major"):
        return x.shape[layout.dim] % batch_size == 0
    return x.shape[layout.dim] == batch_size


def check_size(x: Tensor, layout: Layout, handle: LayerState, batch_size: int) -> None:
    """Refuses an input without rows of its own for every sample."""
    if not has_rows(x, layout, handle, batch_size):
        raise ValueError(
            f"{handle.name or 'the network'} got an input of shape {tuple(x.shape)} for a batch of "
            f"{batch_size} samples, and its samples were seen as {layout} in an earlier batch: "
            "per-sample gradients need every sample's own rows; if the way it is called has "
            "changed, call model.reset_batch_layouts()"
        )
