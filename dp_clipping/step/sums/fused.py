"""Norms, coefficients and sums on the fused kernels: nothing in them waits for the device.

Coefficients stay on the device, and kernels do not load samples whose norm is not finite. A plan
says how each linear layer's norm is taken (`planning.plan`). A launch serves many layers.

A sample whose loss is not finite is left out of all groups that are clipped one by one. A sample
with a norm that is not finite is left out from that launch on: the sums of groups nearer the output
have been sent by then, each with at most its threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.compile_forecast import refuse_repeated
from dp_clipping.clipping.accumulation import SUM_ROUNDING, product_squares, sum_of_one_token
from dp_clipping.clipping.coefficients import (
    CLIPPING_FUNCTIONS,
    MARGIN,
    coefficients,
    finite_samples,
)
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels.coefficients import clip_coefficients, squared_bounds
from dp_clipping.kernels.embedding import Tokens, TokenSums, token_sums
from dp_clipping.kernels.gradient import gradients_and_squares
from dp_clipping.kernels.gram import MOST_SHARED, gram_squares
from dp_clipping.kernels.launch.tiles import available, on_device, tile_of
from dp_clipping.kernels.norm_layer_gradients import norm_layer_gradients
from dp_clipping.kernels.sorted_coefficients import Coefficients, SortedCoefficients
from dp_clipping.kernels.squared_norms import squared_norms, squares_of_vectors
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from dp_clipping.layers.convolution import KernelFactors as ConvolutionFactors
from dp_clipping.layers.convolution import take_norms
from dp_clipping.layers.embedding.factors import TableGradients, TiedFactors
from dp_clipping.layers.embedding.tied import TiedTokens
from dp_clipping.layers.recorder import (
    DENSE,
    FACTORS,
    LINEAR,
    NORMALIZED,
    Left,
    Summand,
    Trainable,
)
from dp_clipping.planning.cost_model import ACCUMULATE, GRAM, INSTANTIATE
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.context import StepContext
from dp_clipping.step.state import BatchNorms
from dp_clipping.torch_compat import version_of

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Table:
    """Points to one embedding among those that share a launch, for its sum."""

    sums: TokenSums
    number: int

    nbytes = 0  # little beside what the forward holds


class Fused:
    """The arithmetic of one batch on kernels; see `work.Arithmetic`.

    Args:
        context: what all steps of the model have in common.
        batch_size: samples of the batch.
        padding: [B] bool, True for rows that are padding; None: no row is.

    Attributes:
        counts: weight -> how often compiled code has used it [1].
    """

    fused = True

    def __init__(self, context: StepContext, batch_size: int, padding: Tensor | None = None):
        self.context, self.batch_size, self.padding = context, batch_size, padding
        self._tile_size = context.policy.tile_size
        self._labels = context.timer.labels_layers()
        self.counts: dict[Trainable, Tensor] = {}
        self._scale: Coefficients | None = None
        # Without norms yet, by their dtype.
        self._vectors: dict[torch.dtype, tuple[list[Trainable], list[Tensor]]] = {}

    def begin(self, losses: Tensor, clip_norms: Tensor, streams: bool) -> None:
        self._clip_norms, self._scale = clip_norms, None
        self.counts.clear()
        self._vectors.clear()
        if self.padding is None:
            left_out = torch.zeros(self.batch_size, dtype=torch.bool, device=losses.device)
        else:
            left_out = self.padding.clone()
        if streams and len(losses):  # not for a row without a sample
            left_out |= ~losses.detach().isfinite().view(self.batch_size, -1).all(1)
        self._left_out = left_out

    def _label(self, what: str, records: Iterable[Trainable]) -> AbstractContextManager:
        """Labels and times work for some parameters, if that is recorded."""
        return self.context.timer.layers(what, records) if self._labels else NOTHING

    # ---- norms ----------------------------------------------------------------------------------

    def norms(self, lefts: list[Left], work: Any, everything: bool) -> None:
        if lefts:
            self._take_norms(lefts, work)
        if everything:
            self._take_norms_of_vectors(work)

    def _take_norms(self, lefts: list[Left], work: Any) -> None:
        """Takes norms. Of biases and scales it forms and keeps G, whose norms are taken later."""
        linear: dict[str, list[tuple[Trainable, Pair, Left]]]
        linear = {INSTANTIATE: [], ACCUMULATE: [], GRAM: []}
        vectors: list[tuple[Trainable, Tensor]] = []
        normalized: list[Left] = []
        factors: list[Left] = []
        choices = work.plans.choices
        lefts.reverse()
        while lefts:  # what factors are packed from is freed then
            left = lefts.pop()
            kind, records, value = left.kind, left.records, left.value
            if kind is LINEAR:
                y, a, how = value
                if y.ndim != 3 or how.layout is not None:
                    y, a = how.tokens(y, a, self.batch_size)
                if how.bias is not None:
                    vectors.append((how.bias, y.sum(1, dtype=torch.float32)))
                if how.weight is not None:
                    pair = (a, y) if how.transposed else (y, a)
                    choice = choices.get(how.weight) or work.plans.choice_of(how.weight, pair)
                    algorithm = choice.algorithm
                    if choice.recomputed:
                        work.recomputed.append(how.weight)
                        algorithm = ACCUMULATE if algorithm == INSTANTIATE else algorithm
                    elif algorithm != INSTANTIATE:
                        work.kept[how.weight] = (pair, left.tensors, left.versions)
                    linear[algorithm].append((how.weight, pair, left))
            elif kind is NORMALIZED:
                normalized.append(left)
            elif kind is DENSE:
                gradients, own = value
                if own is None and gradients.dim() == 2:
                    vectors.append((records[0], gradients))
                    continue
                if not self.context.policy.two_passes or gradients.dim() == 2:
                    work.kept[records[0]] = (gradients, left.tensors, left.versions)
                else:
                    work.recomputed.append(records[0])
                if own is None:
                    with self._label("norm/dense", records):
                        own = squared_norms(gradients)
                work.found([records[0]], own[None])
            else:
                factors.append(left)
        del left, value
        if factors:
            self._take_factors(factors, work)
        if normalized:
            vectors += self._vectors_of(normalized)
        for algorithm in (INSTANTIATE, ACCUMULATE):
            if linear[algorithm]:
                self._accumulate(linear[algorithm], algorithm, work)
        if linear[GRAM]:
            self._multiply_grams(linear[GRAM], work)
        work.keep_gradients(vectors)
        for record, gradients in vectors:
            owners, alike = self._vectors.setdefault(gradients.dtype, ([], []))
            owners.append(record)
            alike.append(gradients)

    def _take_norms_of_vectors(self, work: Any) -> None:
        """Takes norms of biases and scales, by one launch however often others were due before."""
        for records, gradients in self._vectors.values():
            with self._label("norm/dense", records):
                squares = squares_of_vectors(gradients)
            work.found(records, squares)
        self._vectors.clear()

    def _take_factors(self, lefts: list[Left], work: Any) -> None:
        """Takes norms of embeddings and convolutions, which share launches, and of others."""
        two_passes = self.context.policy.two_passes
        records, rows = [], []  # of norms without a scale
        convolutions: list[ConvolutionFactors] = []
        of_convolutions: list[Trainable] = []
        tables: list[Tokens] = []
        of_tables: list[Trainable] = []
        while lefts:
            left = lefts.pop()
            (record,), value = left.records, left.value
            is_tied = type(value) is TiedFactors
            use: Any = TiedTokens.of(value) if is_tied else value.on_kernels()
            del left, value
            if isinstance(use, Tokens):
                tables.append(use)
                of_tables.append(record)
                continue
            if isinstance(use, ConvolutionFactors):
                convolutions.append(use)
                of_convolutions.append(record)
                continue
            keep = not (two_passes and use.may_be_recomputed)
            with self._label("norm/factors", (record,)) if self._labels else NOTHING:
                norm = use.take_norm(keep)
            if norm.scale is None:
                records.append(record)
                rows.append(norm.squared[None])
            else:
                work.norms.table.add(record, norm)
                work.norms.known.add(record)
            if keep:
                work.keep(record, use, use.held(use))
            else:
                work.recomputed.append(record)
        if convolutions:
            with self._label("norm/factors", of_convolutions):
                norms = take_norms(convolutions, keep=not two_passes)
            for record, use, norm in zip(of_convolutions, convolutions, norms, strict=True):
                squares, scales, gram_error, sum_error = norm
                if scales is None:
                    records += [record] * squares.shape[0]
                    rows.append(squares)
                else:
                    work.found([record], squares, scales, gram_error, sum_error)
                if two_passes:
                    work.recomputed.append(record)
                else:
                    work.keep(record, use, use.values)
        if rows:
            work.found(records, torch.cat(rows) if len(rows) > 1 else rows[0])
        if tables:
            with self._label("norm/factors", of_tables):
                found = token_sums(tables, self.batch_size)
            for numbers, sums in found:
                records = [of_tables[n] for n in numbers]
                work.found(records, sums.squares)
                for number, record in enumerate(records):
                    work.kept[record] = (Table(sums, number), (), ())

    def _accumulate(
        self, mine: list[tuple[Trainable, Pair, Left]], algorithm: str, work: Any
    ) -> None:
        """Takes norms of G that is formed, and kept with `INSTANTIATE`."""
        several: list[tuple[Trainable, Pair]] = []
        alone: list[tuple[Trainable, Pair]] = []  # of one token
        for record, pair, _ in mine:
            is_alone = algorithm == ACCUMULATE and pair[0].shape[1] == 1
            (alone if is_alone else several).append((record, pair))
        if alone:
            records = [record for record, _ in alone]
            with self._label(f"norm/{algorithm}", records):
                rows = [product_squares(left[:, 0], right[:, 0]) for _, (left, right) in alone]
            work.found(records, torch.stack(rows))
        if not several:
            return
        records = [record for record, _ in several]
        pairs = [pair for _, pair in several]
        with self._label(f"norm/{algorithm}", records):
            tile = tile_of(self._tile_size, *{left.dtype for left, _ in pairs})
            results = gradients_and_squares(pairs, tile, store=algorithm == INSTANTIATE)
        work.found(records, torch.stack([own for _, own in results]))
        work.keep_gradients(zip(records, [gradients for gradients, _ in results], strict=True))

    def _multiply_grams(self, mine: list[tuple[Trainable, Pair, Left]], work: Any) -> None:
        """Multiplies Gram matrices. Layers that read one input share its matrix, and one norm."""
        shared: dict[tuple, list[list[tuple[Trainable, Tensor, Tensor]]]] = {}
        for record, pair, left in mine:
            y, a = reversed(pair) if left.value[2].transposed else pair
            key = (record.norm_key, a.data_ptr(), a.shape, a.stride(), a.dtype, version_of(a))
            rows = shared.setdefault(key, [[]])
            if len(rows[-1]) == MOST_SHARED:
                rows.append([])
            rows[-1].append((record, a, y))
        launches: dict[tuple, list[list[tuple[Trainable, Tensor, Tensor]]]] = {}
        for (_, _, shape, _, dtype, _), rows in shared.items():
            launches.setdefault((shape[1], dtype), []).extend(rows)
        for (tokens, dtype), rows in launches.items():
            uses = [(row[0][1], [y for _, _, y in row]) for row in rows]
            records = [record for row in rows for record, _, _ in row]
            with self._label("norm/width", records):
                squares, scales = gram_squares(uses, tile_of(self._tile_size, dtype))
            error = tokens * SUM_ROUNDING[torch.float32]
            firsts = [row[0][0] for row in rows]
            work.found(firsts, squares, scales, GRAM_ROUNDING, error)
            work.norms.known.update(records)

    def _vectors_of(self, normalized: list[Left]) -> list[tuple[Trainable, Tensor]]:
        """Returns G of normalisations' weights and biases."""
        uses = [left.value[0] for left in normalized]
        with self._label("norm/normalization", [r for left in normalized for r in left.records]):
            if all([available(*on) for on in {(use.x.device, use.x.dtype) for use in uses}]):
                results = norm_layer_gradients(uses)
            else:  # in the interpreter
                results = [use.plain(torch.float32) for use in uses]
        vectors = []
        for left, formed in zip(normalized, results, strict=True):
            for record, gradients in zip(left.value[1], formed, strict=True):
                if record is not None and gradients is not None:
                    vectors.append((record, gradients))
        return vectors

    # ---- coefficients ---------------------------------------------------------------------------

    def clip(self, work: Any, groups: list[int]) -> BatchNorms | None:
        members, norms = self.context.capture.members, work.norms
        is_all = len(groups) == len(members)
        is_needed = not is_all or bool(work.kept or work.recomputed)
        records = [record for k in groups for record in members[k]]
        refuse_repeated(norms.table, self.counts, records)
        squared = None
        if norms.split.is_split and is_all:
            squared, bounds = norms.squares_and_bounds()
            if is_needed:
                self._scale = self._of_bounds(bounds, groups)
        elif norms.split.is_split:
            _, bounds = norms.exchange([r for r in records if r in norms.known], groups)
            self._scale = self._of_bounds(bounds, groups)
        elif is_needed:
            self._scale = self._of_norms(work, groups)
        if not is_all:
            return None
        squared = norms.table.squared() if squared is None else squared
        left_out = self._left_out
        if self.padding is not None:
            left_out = left_out & ~self.padding
        return BatchNorms(squared.sum(0).sqrt(), squared, left_out.sum())

    def _of_norms(self, work: Any, groups: list[int]) -> Coefficients:
        """Returns coefficients of these groups, 0 for samples without finite norms so far."""
        squares, scales, errors, starts = work.norms.table.rows(groups)
        scales = squares if scales is None else scales  # they are multiplied with 0 then
        device, policy = squares.device, self.context.policy
        table = on_device(errors, torch.float32, device)
        if policy.clipping_function not in CLIPPING_FUNCTIONS:
            return self._of_bounds(squared_bounds(squares, scales, table, starts).float(), groups)
        values = clip_coefficients(
            squares, scales, table, on_device(starts, torch.int32, device),
            self._clip_norms_of(groups), 1 + MARGIN[torch.float32],
            policy.gamma if policy.clipping_function == "automatic" else None, self._left_out,
        )  # fmt: skip
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def _of_bounds(self, bounds: Tensor, groups: list[int]) -> Coefficients:
        """Returns coefficients from upper bounds [K, B] of whole samples' squared norms."""
        clip_norms, policy = self._clip_norms_of(groups), self.context.policy
        self._left_out |= ~finite_samples(bounds)
        values = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        values = values.masked_fill(self._left_out, 0).float()
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def _clip_norms_of(self, groups: list[int]) -> Tensor:
        clip_norms = self._clip_norms
        if len(groups) == len(clip_norms):
            return clip_norms
        return clip_norms[on_device(tuple(groups), torch.int64, clip_norms.device)]

    # ---- sums -----------------------------------------------------------------------------------

    def summands(
        self, lefts: list[Left], taken: set[Trainable]
    ) -> tuple[list[Trainable], list[Summand]]:
        """Returns what a second backward has left for the sums of parameters not `taken` yet."""
        records: list[Trainable] = []
        found: list[Summand] = []

        def add(record: Trainable | None, value: Any, left: Left) -> None:
            if record is not None and record not in taken:
                records.append(record)
                found.append((value, left.tensors, left.versions))

        for left in lefts:
            if left.kind is LINEAR:
                y, a, how = left.value
                y, a = how.tokens(y, a, self.batch_size)
                add(how.weight, (a, y) if how.transposed else (y, a), left)
                if how.bias is not None and how.bias not in taken:
                    add(how.bias, y.sum(1, dtype=torch.float32), left)
            elif left.kind is DENSE:
                add(left.records[0], left.value[0], left)
            elif left.kind is FACTORS:
                value = left.value
                is_tied = type(value) is TiedFactors
                use = TiedTokens.of(value) if is_tied else value.on_kernels()
                add(left.records[0], use, left)
        return records, found

    def sums(self, records: Sequence[Trainable], values: list[Any]) -> list[Tensor]:
        """Returns Σ_i c_i G_i of each parameter, [*parameter] in float32.

        Args:
            values: G [B, *parameter], a linear layer's factors as a pair, a `Table`, or an object
                with `weighted_sum`.
        """
        scale = self._scale
        totals: dict[int, Any] = dict.fromkeys(range(len(values)))
        if len(scale.rows) == 1:  # they are all of that group
            rows = [*scale.rows.values()] * len(records)
        else:
            rows = [scale.rows[record.group] for record in records]
        count = scale.values.shape[0]
        kept: list[tuple[int, int, Tensor]] = []  # number of the parameter, row of coefficients, G
        products: list[tuple[int, int, Pair]] = []
        scaled: list[tuple[int, Tensor]] = []  # rows of coefficients, and what scales them
        parts: dict[int, list[Tensor]] = {}  # of the sums of convolutions
        tables: dict[TokenSums, list[int]] = {}
        alone: list[int] = []  # those of one launch each
        for n, one in enumerate(values):
            if isinstance(one, Tensor):
                kept.append((n, rows[n], one))
            elif isinstance(one, tuple):
                if one[0].shape[1] == 1:
                    alone.append(n)
                else:
                    products.append((n, rows[n], one))
            elif isinstance(one, TableGradients):
                kept.append((n, rows[n], one.gradients))
            elif isinstance(one, Table):
                tables.setdefault(one.sums, []).append(n)
            elif isinstance(one, ConvolutionFactors):
                row, pairs = rows[n], one.summands() if one.gradients is None else ()
                if one.scale is not None:
                    scaled.append((row, one.scale))
                    row = count + len(scaled) - 1
                for pair in pairs:
                    products.append((n, row, pair))
                for gradients in one.gradients or ():
                    kept.append((n, row, gradients))
                parts[n] = []
            else:
                alone.append(n)

        coefficients = _with_scaled(scale.values, scaled) if scaled else scale.values
        found: list[Tensor] = []
        if kept:
            numbers, own, given = zip(*kept, strict=True)
            with self._label("sum", (records[n] for n in numbers)):
                found += weighted_sums(given, coefficients, own)
        if products:
            numbers, own, pairs = zip(*products, strict=True)
            with self._label("sum", (records[n] for n in numbers)):
                tile = tile_of(self._tile_size, *{left.dtype for left, _ in pairs})
                ordered = SortedCoefficients.of(coefficients) if scaled else scale.sorted
                found += weighted_products(pairs, ordered, own, tile)
        for (n, _, _), total in zip((*kept, *products), found, strict=True):
            if n in parts:
                parts[n].append(total)
            else:
                totals[n] = total
        for n, several in parts.items():
            totals[n] = values[n].shaped(several)
        for sums, mine in tables.items():
            with self._label("sum", (records[n] for n in mine)):
                uses = [values[n].number for n in mine]
                found = sums.weighted_sums(uses, scale.values, [rows[n] for n in mine])
            totals |= zip(mine, found, strict=True)
        for n in alone:
            one, c = values[n], scale.values[rows[n]]
            with self._label("sum", (records[n],)) if self._labels else NOTHING:
                if isinstance(one, tuple):
                    totals[n] = sum_of_one_token(*one, c)
                else:
                    totals[n] = one.weighted_sum(c)
        values.clear()
        return list(totals.values())


def _with_scaled(values: Tensor, scaled: list[tuple[int, Tensor]]) -> Tensor:
    """Returns coefficients [K, B], and behind them chosen rows times scales [B]."""
    rows, scales = zip(*scaled, strict=True)
    chosen = values
    if len(values) > 1:
        chosen = values[on_device(rows, torch.int64, values.device)]
    return torch.cat([values, chosen * torch.stack(scales)])
