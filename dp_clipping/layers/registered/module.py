"""A registered layer in a private step: its own forward, and its function's gradients in backward.

Forward is the layer's own, with detached parameters, and ordinary autograd gives the gradient of
its input. `Tap` passes the output on; its backward gets the output's gradient, calls the user's
function and delivers G or its factors, as the arithmetic of any other layer does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import accumulation_dtype, only
from dp_clipping.layers.handle import LayerState, Site, plain_forward
from dp_clipping.layers.projection import gradients_of
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR, Trainable
from dp_clipping.layers.registered.norm_and_sum import LayerSums, NormAndSum, without
from dp_clipping.layers.registered.one_alone import refuse_wrong
from dp_clipping.layers.registered.registry import LinearProduct, arithmetic_of, checked
from dp_clipping.layers.tensor_parallel import arrived
from dp_clipping.layers.vmap.own import replaced
from dp_clipping.torch_compat import never_compiled, tree_flatten, tree_unflatten


@never_compiled
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    handle: LayerState = vars(self)["_private"]
    if handle.private_step is None:
        return plain_forward(self, *args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    use, records = Use(self, leaves, structure), handle.records
    tensors = [leaves[n] for n in use.places]
    y = use.run({name: p.detach() for name, p in use.trainable.items()}, leaves)
    for name, product in use.products(y, tensors).items():
        use.announce(records[name], *product)
    triggers = {handle.private_step.trigger(record) for record in records.values()}
    return Tap.apply(y, use, *(x.detach() for x in tensors), *triggers)


class Use:
    """One call of a registered layer.

    Args:
        leaves, structure: its arguments, flattened.

    Attributes:
        places: of the tensors among the arguments.
        layouts, of_output: where examples are in these, and in the output.
        rows: number of examples.
        trainable: name -> parameter.
    """

    def __init__(self, module: nn.Module, leaves: list[Any], structure: Any):
        handle: LayerState = vars(module)["_private"]
        self.module, self.handle, self.structure = module, handle, structure
        self.step: Any = handle.private_step
        self.title, self.rows = handle.title(module), handle.rows
        self.arithmetic = arithmetic_of(module)
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[n] for n in self.places]
        self.layouts = handle.layouts_of(tensors, self.rows, of_units=False)
        self.of_output, *others = handle.output_layouts_of(tensors, of_units=False)
        if others or self.of_output.kind == "shared":
            raise ValueError(
                f"{self.title} returns {len(others) + 1} tensors, or one that is the same for all "
                "samples, and register_layer is for layers that return one tensor with a row for "
                "each sample: give it x.expand(len(batch), ..), or leave out register_layer"
            )
        self.trainable = {name: one.parameter for name, one in handle.records.items()}
        # Tensors are saved by autograd, which notices what is changed in place.
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]

    def run(self, parameters: dict[str, Tensor], leaves: list[Any]) -> Tensor:
        """Runs the layer's own forward with these parameters and arguments."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        with replaced(self.module, parameters):
            return plain_forward(self.module, *args, **kwargs)

    def row(self, found: Tensor | LinearProduct | NormAndSum, i: int) -> Tensor:
        """Returns G of example i."""
        if isinstance(found, NormAndSum):
            return found.sums.rows_of(found.name, [i])[0]
        if isinstance(found, LinearProduct):
            return gradients_of(found.gradients[i : i + 1], found.activations[i : i + 1])[0]
        return found[i]

    def call(self, gradient: Tensor, tensors: list[Tensor]) -> Mapping[str, Any]:
        """Calls the user's function on tensors with the samples in front.

        Where there are two functions, the factors with which they are called.
        """
        rows, shapes = len(gradient), {n: tuple(p.shape) for n, p in self.trainable.items()}
        who = f"registered for {self.title}"
        if self.arithmetic.gradients is not None:
            found = self._run(self.arithmetic.gradients, tensors, gradient)
            of_rows = {name: (rows, *shape) for name, shape in shapes.items()}
            return checked(found, of_rows, f"the function {who}", are_gradients=True)

        def norm() -> Mapping[str, Tensor]:
            found = self._run(self.arithmetic.norm, tensors, gradient)
            return checked(found, dict.fromkeys(shapes, (rows,)), f"the norm {who}")

        def weighted_sum(c: Tensor, counts: Tensor) -> Mapping[str, Tensor]:
            pairs = zip(tensors, self.layouts, strict=True)
            mine = [x if at.kind == "shared" else without(x, counts) for x, at in pairs]
            found = self._run(
                self.arithmetic.weighted_sum, mine, only(gradient, counts), only(c, counts)
            )
            return checked(found, shapes, f"the weighted_sum {who}")

        sums = LayerSums(norm, weighted_sum, rows, gradient, (gradient, *tensors))
        return {name: NormAndSum(sums, name) for name in shapes}

    def _run(self, function: Any, tensors: list[Tensor], *first: Tensor) -> Any:
        """Returns function(layer, *first, *args, **kwargs)."""
        leaves = list(self.leaves)
        for n, x in zip(self.places, tensors, strict=True):
            leaves[n] = x
        args, kwargs = tree_unflatten(leaves, self.structure)
        with torch.no_grad():
            return function(self.module, *first, *args, **kwargs)

    def batch_first(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the inputs with the examples in front; those that all share as they are."""
        pairs = zip(tensors, self.layouts, strict=True)
        return [x if at.kind == "shared" else at.batch_first(x, self.rows) for x, at in pairs]

    def products(self, y: Tensor, tensors: list[Tensor]) -> dict[str, tuple[int, torch.dtype]]:
        """Returns name -> tokens and dtype of the products that the function will return.

        It is asked with one sample and a gradient of zeros, once for samples of each shape.
        """
        if self.arithmetic.gradients is None:
            return {}
        rows = [
            x if at.kind == "shared" else x[:1]
            for x, at in zip(self.batch_first(tensors), self.layouts, strict=True)
        ]
        gradient = torch.zeros_like(self.of_output.batch_first(y.detach(), self.rows)[:1])
        key = tuple((x.shape, x.dtype) for x in (*rows, gradient))
        known = self.handle.products
        if key not in known:
            known[key] = {
                name: (g.activations.shape[1], g.activations.dtype)
                for name, g in self.call(gradient, rows).items()
                if isinstance(g, LinearProduct) and name in self.trainable
            }
        return known[key]

    def announce(self, record: Trainable, tokens: int, dtype: torch.dtype) -> None:
        """Tells the step of a product that the function will return for a weight."""
        if Site(Tap, record).planned is not None:
            outputs, inputs = record.parameter.shape
            shape = (self.step.batch_size, tokens * self.step.examples_per_unit, inputs)
            self.step.plans.calls.append((record, torch.Size(shape), dtype, outputs))

    def deliver(self, gradient: Tensor, tensors: list[Tensor]) -> None:
        """Leaves G of all parameters, or its factors, to the private step."""
        k = self.step.examples_per_unit
        rows = self.of_output.batch_first(gradient, self.rows)
        found = self.call(rows, self.batch_first(tensors))
        refuse_wrong(self, gradient, tensors, found)
        for name, record in self.handle.records.items():
            g = found[name]
            if isinstance(g, LinearProduct):
                a, y = (_units(x, k).flatten(1, 2) for x in (g.activations, g.gradients))
                self.step.take(LINEAR, (record,), Site(Tap, record), (y, a))
                continue
            if isinstance(g, NormAndSum) and k == 1:
                self.step.take(FACTORS, (record,), g, g.held(g))
                continue
            if isinstance(g, NormAndSum):
                g = g.sums.rows_of(name, range(self.rows // k), k)
            elif k > 1:
                g = _units(g, k).sum(1, dtype=accumulation_dtype(g.dtype))
            self.step.take(DENSE, (record,), None, (g,))


def _units(x: Tensor, examples_per_unit: int) -> Tensor:
    """Returns x [B·k, ..] as [B, k, ..]."""
    return x.unflatten(0, (-1, examples_per_unit))


class Tap(torch.autograd.Function):
    """Returns y; its backward lets the layer's function compute G, and passes the gradient on.

    The output shares memory and version with y: what changes it in place is noticed as without it.
    """

    @staticmethod
    def forward(ctx, y, use, *tensors):
        ctx.use, count = use, len(use.places)
        ctx.save_for_backward(*tensors[:count])
        return y.detach()

    @staticmethod
    def backward(ctx, gy):
        inputs, gy = list(ctx.saved_tensors), arrived(gy)
        ctx.use.deliver(gy, inputs)
        return gy, *[None] * (len(ctx.needs_input_grad) - 1)
