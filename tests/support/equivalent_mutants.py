"""Mutants that compute the same as the original for all input, each with its reason.

(file, lines before, lines after): why no test can tell. At most 3 % of those that
`tests.support.mutation_score` draws.
"""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("dp_clipping/accounting/balls_in_bins.py",
     "size = int(places.max()) - first + 2", "size = int(places.max()) - first + 3"):
        "the place more has no mass, and places without mass at the end are cut off",
    ("dp_clipping/accounting/balls_in_bins.py", "@lru_cache(4)", "@lru_cache( 5)"):
        "the size of a cache changes speed alone",
    ("dp_clipping/step/private_step.py",
     "losses = losses.masked_fill(self.fill, 0)", "losses = losses.masked_fill(self.fill, 1)"):
        "a constant has no gradient, and of losses only that they are finite is read",
    ("dp_clipping/accounting/truncated_poisson.py", "@lru_cache(4)", ""):
        "a cache of what its arguments alone say changes speed alone",
    ("dp_clipping/clipping/accumulation.py",
     "torch.mv(piece.t(), coefficients, out=total[start : start + width])",
     "torch.mv(piece.t(), coefficients, out=total[start : start // width])"):
        "an empty output grows where it begins, in the same storage",
    ("dp_clipping/step/sums/work.py",
     "[((r,), tensors, v) for r, (_, tensors, v) in zip(records, summands, strict=True)]",
     "[((r,), tensors, v) for r, (_, tensors, v) in zip(records, summands, strict=False)]"):
        "every caller makes both lists with one entry for each parameter",
    ("dp_clipping/step/private_step.py", "@staticmethod", ""):
        "PyTorch calls backward as the class's attribute, which is the function either way",
}  # fmt: skip
