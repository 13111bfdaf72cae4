"""A private step on the fused kernels: nothing in it waits for the device.

The session of the `flash` modes where their kernels run. Layers hand over what they do in any
session. Here a plan says what becomes of a linear layer's factors, coefficients stay on the device,
and samples whose norm is not finite are left out by kernels that do not load them.

Under `per_layer` clipping with one backward a layer's sum is formed as soon as its last gradient is
there: nothing but that layer is stored, and there is no second phase.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.clip import MARGIN
from dp_clipping.kernels.coefficients import clip_coefficients
from dp_clipping.kernels.gradient import gradient_and_squares, stored_dtype
from dp_clipping.kernels.gram import MOST_SHARED, gram_squares
from dp_clipping.kernels.squares import squares
from dp_clipping.kernels.tiles import Tile
from dp_clipping.kernels.weighted_product import weighted_product
from dp_clipping.kernels.weighted_sum import weighted_sum
from dp_clipping.layers.arithmetic import SUM_ROUNDING, Weights
from dp_clipping.layers.linear import GRAM_ROUNDING, LinearFactors
from dp_clipping.norms import Norm, on_device
from dp_clipping.plan import GRADIENT, WIDTH, Choice, Plan, Use, rates_of
from dp_clipping.session import Session

PENDING_BYTES = 1 << 28  # of factors that wait for a common launch and are not kept anyway
SHARE = 0.93  # of an ordinary step's memory: the rest is for what backward holds in passing


class FusedSession(Session):
    """See `Session`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._before = _allocated(self.anchor.device)

    def _forget(self) -> None:
        super()._forget()
        self._uses: dict[Parameter, Use] = {}
        self._pending: dict[Parameter, LinearFactors] = {}
        self._vectors: dict[Parameter, Tensor] = {}
        self._handed_on: set[Parameter] = set()

    @property
    def _streams(self) -> bool:
        return self.policy.per_layer and not self._needs_second_pass()

    # ---- what layers ask in forward -------------------------------------------------------------

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        return False

    def will_use(self, parameter: Parameter, x: Tensor, outputs: int) -> None:
        inputs = x.shape[-1]
        tokens = x.numel() // max(1, inputs * self.batch_size)
        self._uses[parameter] = Use(
            self.capture.names[parameter], self.batch_size, tokens, inputs, outputs,
            x.element_size(), stored_dtype(x.dtype).itemsize,
        )  # fmt: skip

    # ---- what layers hand over in backward ------------------------------------------------------

    def dense(self, parameter: Parameter, gradients: Tensor) -> None:
        if self._is_second_visit(parameter):
            return
        self._arrived(parameter)
        if self._summing:
            self._hand_on(parameter, gradients)
            return
        if gradients.dim() == 2 and not self._streams:
            self._vectors[parameter] = gradients  # normed together: there are many, all small
        else:
            with self._range("norm/dense", parameter):
                self._norms[parameter] = Norm(squares(gradients))
        self._keep(parameter, gradients, recomputed=self.policy.two_passes and gradients.dim() > 2)

    def factors(self, parameter: Parameter, factors: Any) -> None:
        if self._is_second_visit(parameter):
            return
        self._arrived(parameter)
        if self._summing:
            self._hand_on(parameter, factors)
        elif isinstance(factors, LinearFactors):
            self._take_linear(parameter, factors)
        else:
            with self._range("norm/factors", parameter):
                self._norms[parameter] = factors.norm()
            self._keep(parameter, factors)

    def _is_second_visit(self, parameter: Parameter) -> bool:
        """A second backward passes through layers whose remains were kept."""
        return self._summing and (parameter in self._kept or parameter in self._handed_on)

    def _take_linear(self, parameter: Parameter, factors: LinearFactors) -> None:
        choice = self._choice_of(parameter, factors)
        tile = self._tile(factors.y.dtype)
        left, right = factors.operands
        if choice.algorithm == GRADIENT:
            with self._range("norm/gradient", parameter):
                gradients, own = gradient_and_squares(
                    left, right, tile, store=not choice.recomputed
                )
            self._norms[parameter] = Norm(own)
            self._keep(parameter, gradients, choice.recomputed)
            return
        if choice.algorithm == WIDTH:
            self._pending[parameter] = factors
            waiting = sum(use.bytes for use in self._pending.values())
            if self._streams or (choice.recomputed and waiting > PENDING_BYTES):
                self._norm_pending()
        else:
            with self._range("norm/input_length", parameter):
                _, own = gradient_and_squares(left, right, tile, store=False)
            self._norms[parameter] = Norm(own)
        self._keep(parameter, factors, choice.recomputed)

    def _choice_of(self, parameter: Parameter, factors: LinearFactors) -> Choice:
        if parameter not in self._uses:  # a layer of a frozen-in-forward path, or compiled around
            left, right = factors.operands
            self.will_use(parameter, right, left.shape[-1])
            return self._plan_of([self._uses[parameter]])[self.capture.names[parameter]]
        return self.plan[self.capture.names[parameter]]

    def _keep(self, parameter: Parameter, remains: Any, recomputed: bool = False) -> None:
        if recomputed:
            self._recomputed.append(parameter)
        else:
            self._kept[parameter] = remains
        if self._streams:
            self._clip_complete_group(self.capture.groups[parameter])

    # ---- the step -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.plan = self._plan_of(list(self._uses.values()))
        self.capture.plan = self.plan

    def _plan_of(self, uses: list[Use]) -> Plan:
        key = tuple(uses)
        plans = self.capture.plans
        if key not in plans:
            plans[key] = Plan(
                uses, rates_of(self.anchor.device), self._budget(), self.policy.norm_algorithm,
                may_recompute=self.policy.two_passes or self.policy.memory_budget is not None,
            )  # fmt: skip
        return plans[key]

    def _budget(self) -> int | None:
        """Bytes that may be kept: what was asked for, or what an ordinary step would hold too.

        That is what the forward has saved, which backward frees as it goes, or the gradients that
        it would leave, whichever is more.
        """
        if self.policy.memory_budget is not None:
            return self.policy.memory_budget
        if self.policy.two_passes:
            return 0
        if self.policy.per_layer:
            return None  # nothing is kept beyond its layer
        in_use = _allocated(self.anchor.device)
        gradients = sum(p.numel() * p.element_size() for p in self.capture.parameters)
        return int(SHARE * max(in_use - self._before, gradients))

    def _needs_second_pass(self) -> bool:
        return self.policy.two_passes or not self.plan.is_one_pass

    def _second_anchors(self) -> list[Tensor]:
        """Only as deep as it must."""
        return [self.capture.anchors[parameter] for parameter in self._recomputed]

    def _norm_pending(self) -> None:
        """One launch for Gram norms of the same shape; layers with one input share its matrix."""
        pending, self._pending = self._pending, {}
        shared: dict[tuple, list[Parameter]] = {}
        for parameter, factors in pending.items():
            a, group = factors.a, self.capture.groups[parameter]
            key = (group, a.data_ptr(), a.shape, a.stride(), a.dtype, a._version)
            key += (sum(len(mine) for k, mine in shared.items() if k[:6] == key) // MOST_SHARED,)
            shared.setdefault(key, []).append(parameter)
        launches: dict[tuple, list[list[Parameter]]] = {}
        for (_, _, shape, _, dtype, *_), mine in shared.items():
            launches.setdefault((shape[1], dtype), []).append(mine)
        for (tokens, _), rows in launches.items():
            uses = [(pending[row[0]].a, [pending[p].y for p in row]) for row in rows]
            with self._range("norm/width", *(p for row in rows for p in row)):
                found = gram_squares(uses, self._tile(uses[0][0].dtype))
            error = tokens * SUM_ROUNDING[torch.float32]
            for row, own, scale in zip(rows, *found, strict=True):
                self._norms[row[0]] = Norm(own, scale, GRAM_ROUNDING, error)

    def _norm_vectors(self) -> None:
        vectors, self._vectors = self._vectors, {}
        alike: dict[tuple, list[Parameter]] = {}
        for parameter, gradients in vectors.items():
            alike.setdefault((gradients.shape, gradients.dtype), []).append(parameter)
        for (shape, _), mine in alike.items():
            with self._range("norm/dense", *mine):
                rows = torch.stack([vectors[p] for p in mine]).view(-1, shape[1])
                found = squares(rows).view(len(mine), -1)
            for parameter, own in zip(mine, found, strict=True):
                self._norms[parameter] = Norm(own)

    def _clip(self, limits: Tensor) -> Tensor:
        self._norm_pending()
        self._norm_vectors()
        norms = self._norms
        if not norms:
            self.nonfinite = 0
            return self._zero()
        if self._kept or self._recomputed:  # not all of it streamed
            scale = self._coefficients(list(range(len(limits))), limits)
            self._weights = [Weights(row) for row in scale]
        squared = torch.stack([norm.squared for norm in norms.values()])
        self.nonfinite = self.batch_size - torch.isfinite(squared).all(0).sum()
        return squared.clamp_min(0).sum(0).sqrt()

    def _coefficients(self, groups: list[int], limits: Tensor) -> Tensor:
        """c [groups, B] on the device."""
        members = self.capture.members
        mine = [[self._norms[p] for p in members[k] if p in self._norms] for k in groups]
        norms = [norm for own in mine for norm in own] or [Norm(self._zero())]
        squares = torch.stack([norm.squared for norm in norms])
        scales = squares  # if no norm has errors, they are multiplied with 0
        if any(norm.scale is not None for norm in norms):
            zero = self._zero()
            scales = torch.stack([zero if n.scale is None else n.scale for n in norms])
        errors = tuple((norm.gram_error, norm.sum_error) for norm in norms)
        starts = tuple(accumulate((len(own) for own in mine), initial=0))
        device, policy = squares.device, self.policy
        scale, _ = clip_coefficients(
            squares, scales, on_device(errors, torch.float32, device),
            on_device(starts, torch.int32, device), limits, 1 + MARGIN[torch.float32],
            policy.gamma if policy.clipping_function == "automatic" else None,
        )  # fmt: skip
        return scale

    def _tile(self, dtype: torch.dtype) -> Tile | None:
        size = self.policy.tile_size
        return None if size is None else Tile(size, size, min(size, 128 // dtype.itemsize), 4, 3)

    def _hand_on(self, parameter: Parameter, remains: Any) -> None:
        self._sum_one(parameter, remains, self._weights[self.capture.groups[parameter]])

    def _clip_complete_group(self, group: int) -> None:
        """Sum what a clipping group has left, if all of it is there."""
        mine = [p for p in self.capture.members[group] if p in self._kept]
        if len(mine) < len(self.capture.members[group]):
            return
        weights = Weights(self._coefficients([group], self._limits[group : group + 1])[0])
        for parameter in mine:
            self._handed_on.add(parameter)
            self._sum_one(parameter, self._kept.pop(parameter), weights)

    @torch.no_grad()
    def _sum_one(self, parameter: Parameter, remains: Any, weights: Weights) -> None:
        with self._range("sum", parameter):
            if isinstance(remains, Tensor):
                total = weighted_sum(remains, weights.values)
            elif isinstance(remains, LinearFactors):
                total = weighted_product(
                    *remains.operands, weights.ascending, self._tile(remains.y.dtype)
                )
            else:
                total = remains.weighted_sum(weights)
        self._receive(parameter, total)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
