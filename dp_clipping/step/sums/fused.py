"""Norms, coefficients and sums on the fused kernels: nothing in them waits for the device.

Coefficients stay on the device, and kernels do not load samples whose norm is not finite. A plan
says how each linear layer's norm is taken (`planning.plan`). A launch serves many layers.

A sample whose loss is not finite is left out of all groups that are clipped one by one. A sample
with a norm that is not finite is left out from that launch on: the sums of groups nearer the output
have been sent by then, each with at most its threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.compile_forecast import refuse_repeated
from dp_clipping.clipping.accumulation import SUM_ROUNDING
from dp_clipping.clipping.coefficients import (
    CLIPPING_FUNCTIONS,
    MARGIN,
    coefficients,
    finite_samples,
)
from dp_clipping.clipping.norms import GRAM_ROUNDING, Norm
from dp_clipping.kernels.coefficients import Coefficients, clip_coefficients, squared_bounds
from dp_clipping.kernels.convolution.factors import take_norms
from dp_clipping.kernels.convolution.layout import ConvolutionFactors
from dp_clipping.kernels.convolution.packing import packed_at_a_time
from dp_clipping.kernels.embedding import Tokens, token_sums
from dp_clipping.kernels.gradient import TileSquares, gradients_and_squares, squares_of_tiles
from dp_clipping.kernels.gram import MOST_SHARED, gram_squares
from dp_clipping.kernels.launch.tiles import available, on_device, tile_of
from dp_clipping.kernels.norm_layer_gradients import Normalized, norm_layer_gradients
from dp_clipping.kernels.squared_norms import (
    squared_norms,
    squares_of_products,
    squares_of_vectors,
)
from dp_clipping.layers import convolution
from dp_clipping.layers.norm import plain_gradients
from dp_clipping.layers.projection import precision_of
from dp_clipping.layers.recorder import (
    DENSE,
    FACTORS,
    LINEAR,
    NORMALIZED,
    Accumulate,
    Left,
    Summand,
    Trainable,
)
from dp_clipping.planning.cost_model import ACCUMULATE, GRAM, INSTANTIATE
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.clipped_sums import Table, clipped_sums
from dp_clipping.step.sums.layer_plans import FusedPlans
from dp_clipping.step.sums.work import Work
from dp_clipping.torch_compat import version_of

Pair = tuple[Tensor, Tensor]
Owners = tuple[Trainable | None, Trainable | None]  # of a weight and a bias


class Fused(Work):
    """The work of one batch on kernels."""

    fused = True
    plans: FusedPlans

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        super().begin(losses, clip_norms, accumulate)
        self._tile_size = self.context.policy.tile_size
        self._scale: Coefficients | None = None
        # Without norms yet: G of vectors, by their dtype, and squares of tiles.
        self._vectors: dict[torch.dtype, tuple[list[Trainable], list[Tensor]]] = {}
        self._tiles: list[tuple[Trainable, Sequence[TileSquares], int, Tensor | None]] = []
        if self.padding is None:
            self._left_out = losses.new_zeros(self.batch_size, dtype=torch.bool)
        else:
            self._left_out = self.padding.clone()
        if self.streams and len(losses):  # not for a row without a sample
            self._left_out |= ~losses.detach().isfinite().view(self.batch_size, -1).all(1)

    def take_norms(self, lefts: list[Left], everything: bool) -> None:
        if lefts:
            self._sort(lefts)
        if everything:
            self._take_norms_of_vectors()
            self._take_norms_of_tiles()

    def _sort(self, lefts: list[Left]) -> None:
        """Takes norms. Of biases and scales it forms and keeps G, whose norms are taken later."""
        linear: dict[str, list[tuple[Trainable, Pair, Left]]]
        linear = {INSTANTIATE: [], ACCUMULATE: [], GRAM: []}
        vectors: list[tuple[Trainable, Tensor]] = []
        of_vectors: list[tuple[Normalized, Owners]] = []
        factors: list[Left] = []
        choices, label = self.plans.choices, self._label
        lefts.reverse()
        while lefts:  # what factors are packed from is freed then
            left = lefts.pop()
            kind, records, value = left.kind, left.records, left.value
            if kind is LINEAR:
                (y, a), how = left.tensors, value
                if y.ndim != 3 or how.layout is not None:
                    y, a = how.tokens(y, a, self.batch_size)
                if how.bias is not None:
                    # `Normalized(..)` would call a function in Python.
                    only_bias = tuple.__new__(Normalized, (y, None, None, None, True))
                    of_vectors.append((only_bias, (None, how.bias)))
                    del only_bias
                if how.weight is not None:
                    pair = (a, y) if how.transposed else (y, a)
                    choice = choices.get(how.weight) or self.plans.choice_of(how.weight, pair)
                    if how.weight in self.plans.roundable and precision_of(how) == "tf32":
                        use = convolution.rounded_product(*pair)
                        factors.append(Left(FACTORS, (how.weight,), use, (y, a), left.versions))
                        del use, pair, y, a
                        continue
                    algorithm = choice.algorithm
                    if choice.recomputed:
                        self.recomputed.append(how.weight)
                        algorithm = ACCUMULATE if algorithm == INSTANTIATE else algorithm
                    elif algorithm != INSTANTIATE:
                        self.kept[how.weight] = (pair, left.tensors, left.versions)
                    linear[algorithm].append((how.weight, pair, left))
            elif kind is NORMALIZED:
                of_vectors.append(value)
            elif kind is DENSE:
                for record, gradients in zip(records, left.tensors, strict=True):
                    if value is None and gradients.dim() == 2:
                        vectors.append((record, gradients))
                        continue
                    if not self.two_passes or gradients.dim() == 2:
                        self.kept[record] = (gradients, left.tensors, left.versions)
                    else:
                        self.recomputed.append(record)
                    own = value
                    if own is None:
                        with NOTHING if label is None else label("norm/dense", (record,)):
                            own = squared_norms(gradients)
                    self.norms.table.add_rows((record,), own[None])
                del gradients
            else:
                factors.append(left)
        del left, value
        if of_vectors:  # before others, which free what they are formed of
            vectors += self._vectors_of(of_vectors)
            of_vectors.clear()
        if factors:
            self._take_factors(factors)
        for algorithm in (INSTANTIATE, ACCUMULATE):
            if linear[algorithm]:
                self._form_gradients(linear[algorithm], algorithm)
        if linear[GRAM]:
            self._multiply_grams(linear[GRAM])
        self.keep(vectors)
        for record, gradients in vectors:
            owners, alike = self._vectors.setdefault(gradients.dtype, ([], []))
            owners.append(record)
            alike.append(gradients)

    def _take_norms_of_vectors(self) -> None:
        """Takes norms of biases and scales, by one launch however often others were due before."""
        for records, gradients in self._vectors.values():
            with NOTHING if self._label is None else self._label("norm/dense", records):
                squares = squares_of_vectors(gradients)
            self.norms.table.add_rows(records, squares)
        self._vectors.clear()

    def _take_norms_of_tiles(self) -> None:
        """Adds up squares of tiles, by one launch."""
        if not self._tiles:
            return
        records, tiles, groups, scales = zip(*self._tiles, strict=True)
        with NOTHING if self._label is None else self._label("norm/tiles", records):
            squares = squares_of_tiles(tiles, groups, scales, self.batch_size)
        self.norms.table.add_rows(records, squares)
        self._tiles.clear()

    def _take_factors(self, lefts: list[Left]) -> None:
        """Takes norms of embeddings and convolutions, which share launches, and of others."""
        table, label = self.norms.table, self._label
        records, rows = [], []  # of norms without a scale
        convolutions: list[ConvolutionFactors] = []
        of_convolutions: list[Trainable] = []
        tables: list[Tokens] = []
        of_tables: list[Trainable] = []
        while lefts:
            left = lefts.pop()
            (record,), value = left.records, left.value
            if type(value) is ConvolutionFactors:
                convolutions.append(value)
                of_convolutions.append(record)
                del left, value
                continue
            use = value.on_kernels()
            del left, value
            if isinstance(use, Tokens):
                tables.append(use)
                of_tables.append(record)
                continue
            is_formed = isinstance(use, Tensor)  # which nobody else has
            keep = is_formed or not self.two_passes
            with NOTHING if label is None else label("norm/factors", (record,)):
                norm = Norm(squared_norms(use)) if is_formed else use.norm()
            if norm.scale is None:
                records.append(record)
                rows.append(norm.squared[None])
            else:
                table.add(record, norm)
            if keep:
                self.keep(((record, use),))
            else:
                self.recomputed.append(record)
        if convolutions:
            most = packed_at_a_time(self.freed)
            with NOTHING if label is None else label("norm/factors", of_convolutions):
                norms, tiled = take_norms(convolutions, not self.two_passes, most)
            for numbers, *norm in norms:
                table.add_rows(list(map(of_convolutions.__getitem__, numbers)), *norm)
            for n, tiles, groups, scale in tiled:
                self._tiles.append((of_convolutions[n], tiles, groups, scale))
            if self.two_passes:
                self.recomputed += of_convolutions
            else:
                self.keep(zip(of_convolutions, convolutions, strict=True))
        if rows:
            table.add_rows(records, torch.cat(rows) if len(rows) > 1 else rows[0])
        if tables:
            with NOTHING if label is None else label("norm/factors", of_tables):
                found = token_sums(tables, self.batch_size)
            for numbers, sums in found:
                records = [of_tables[n] for n in numbers]
                table.add_rows(records, sums.squares)
                for number, record in enumerate(records):
                    self.kept[record] = (Table(sums, number), (), ())

    def _form_gradients(self, mine: list[tuple[Trainable, Pair, Left]], algorithm: str) -> None:
        """Takes norms of G that is formed, and kept with `INSTANTIATE`."""
        table, label = self.norms.table, self._label
        several: list[tuple[Trainable, Pair]] = []
        alone: dict[torch.dtype, list[tuple[Trainable, Pair]]] = {}  # of one token
        for record, pair, _ in mine:
            is_alone = algorithm == ACCUMULATE and pair[0].shape[1] == 1
            (alone.setdefault(pair[0].dtype, []) if is_alone else several).append((record, pair))
        for alike in alone.values():
            records = [record for record, _ in alike]
            with NOTHING if label is None else label(f"norm/{algorithm}", records):
                squares = squares_of_products([(y[:, 0], a[:, 0]) for _, (y, a) in alike])
            table.add_rows(records, squares)
        if not several:
            return
        records = [record for record, _ in several]
        pairs = [pair for _, pair in several]
        with NOTHING if label is None else label(f"norm/{algorithm}", records):
            tile = tile_of(self._tile_size, *{left.dtype for left, _ in pairs})
            gradients, tiles = gradients_and_squares(pairs, tile, algorithm == INSTANTIATE)
        for record, its in zip(records, tiles, strict=True):
            self._tiles.append((record, (its,), 1, None))
        if algorithm == INSTANTIATE:
            self.keep(zip(records, gradients, strict=True))

    def _multiply_grams(self, mine: list[tuple[Trainable, Pair, Left]]) -> None:
        """Multiplies Gram matrices. Layers that read one input share its matrix, and one norm."""
        table, label = self.norms.table, self._label
        shared: dict[tuple, list[list[tuple[Trainable, Tensor, Tensor]]]] = {}
        for record, pair, left in mine:
            y, a = reversed(pair) if left.value.transposed else pair
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
            with NOTHING if label is None else label("norm/width", records):
                squares, scales = gram_squares(uses, tile_of(self._tile_size, dtype))
            error = tokens * SUM_ROUNDING[torch.float32]
            firsts = [row[0][0] for row in rows]
            table.add_rows(firsts, squares, scales, GRAM_ROUNDING, error)
            table.known.update(records)

    def _vectors_of(
        self, several: list[tuple[Normalized, Owners]]
    ) -> list[tuple[Trainable, Tensor]]:
        """Returns G of normalisations' weights, and of biases."""
        uses, label = [use for use, _ in several], self._label
        records = [one for _, owners in several for one in owners if one is not None]
        with NOTHING if label is None else label("norm/vectors", records):
            if all([available(*on) for on in {(use.y.device, use.y.dtype) for use in uses}]):
                results = norm_layer_gradients(uses)
            else:  # in the interpreter
                results = [plain_gradients(use, torch.float32) for use in uses]
        return [
            (record, gradients)
            for (_, owners), formed in zip(several, results, strict=True)
            for record, gradients in zip(owners, formed, strict=True)
            if record is not None and gradients is not None
        ]

    def set_coefficients(self, groups: list[int]) -> BatchNorms | None:
        members, norms = self.context.capture.members, self.norms
        is_all = len(groups) == len(members)
        records = [record for k in groups for record in members[k]]
        if self.counts:
            refuse_repeated(norms.table, self.counts, records)
        squared = None
        if norms.split is not None:
            squared, bounds = norms.squares_and_bounds()
            self._scale = self._of_bounds(bounds, groups)
        elif not is_all or self.kept or self.recomputed:
            self._scale = self._of_norms(groups)
        if not is_all:
            return None
        squared = norms.table.squared() if squared is None else squared
        samples = self._left_out if self.padding is None else self._left_out & ~self.padding
        return BatchNorms(squared.sum(0).sqrt(), squared, samples.sum())

    def _of_norms(self, groups: list[int]) -> Coefficients:
        """Returns coefficients of these groups, 0 for samples without finite norms so far."""
        squares, scales, errors, starts = self.norms.table.rows(groups)
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
        clip_norms = self.clip_norms
        if len(groups) == len(clip_norms):
            return clip_norms
        return clip_norms[on_device(tuple(groups), torch.int64, clip_norms.device)]

    def summands(self, lefts: list[Left]) -> tuple[list[Trainable], list[Summand]]:
        records: list[Trainable] = []
        found: list[Summand] = []

        def add(record: Trainable | None, value: Any, left: Left) -> None:
            if record is not None and record not in self.taken:
                records.append(record)
                found.append((value, left.tensors, left.versions))

        for left in lefts:
            if left.kind is LINEAR:
                how = left.value
                y, a = how.tokens(*left.tensors, self.batch_size)
                pair: Any = (a, y) if how.transposed else (y, a)
                if how.weight in self.plans.roundable and precision_of(how) == "tf32":
                    pair = convolution.rounded_product(*pair)
                add(how.weight, pair, left)
                if how.bias is not None and how.bias not in self.taken:
                    add(how.bias, y.sum(1, dtype=torch.float32), left)
            elif left.kind is DENSE:
                for record, gradients in zip(left.records, left.tensors, strict=True):
                    add(record, gradients, left)
            elif left.kind is FACTORS:
                add(left.records[0], left.value.on_kernels(), left)
        return records, found

    def sums(self, records: Sequence[Trainable], values: list[Any]) -> list[Tensor]:
        assert self._scale is not None
        return clipped_sums(records, values, self._scale, self._tile_size, self._label)
