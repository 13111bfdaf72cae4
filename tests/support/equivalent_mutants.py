"""Mutants that compute the same as the original for all input, each with its reason.

(file, lines before, lines after): why no test can tell. At most 3 % of those that
`tests.support.mutation_score` draws.
"""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
