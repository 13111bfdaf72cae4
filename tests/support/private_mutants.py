"""Mistakes of private training, one line each, and the tests that catch them: see mutants.py.

A row: name, file in dp_clipping/, text, replacement, test file, and perhaps -k.
"""

ACCOUNTS = "tests/dp_clipping/runs/test_accounts.py"
COEFFICIENTS = "tests/dp_clipping/clipping/test_coefficients.py"
NORMS = "tests/dp_clipping/clipping/test_norms.py"
ACCUMULATION = "tests/dp_clipping/clipping/test_accumulation.py"
STATISTICS = "tests/dp_clipping/clipping/test_statistics.py"
LINEAR = "tests/dp_clipping/layers/test_projection.py"
FACTORS = "tests/dp_clipping/layers/test_linear_factors.py"
EMBEDDING = "tests/dp_clipping/layers/embedding/test_factors.py"
NORM = "tests/dp_clipping/layers/test_norm.py"
SCALED = "tests/dp_clipping/layers/test_low_precision_sums.py"
UNITS = "tests/dp_clipping/test_units_of_privacy.py"
STEP = "tests/dp_clipping/step/test_private_step.py"
BUFFER = "tests/dp_clipping/step/test_gradient_buffer.py"
REPLAY = "tests/dp_clipping/step/test_rng_replay.py"
GAUSSIAN = "tests/dp_clipping/noise/test_gaussian.py"
KEYS = "tests/dp_clipping/noise/test_keys.py"
ADAPTIVE = "tests/dp_clipping/noise/test_adaptive_threshold.py"
POISSON = "tests/dp_clipping/sampling/test_poisson.py"
LOADER = "tests/dp_clipping/sampling/test_loader.py"
USAGE = "tests/dp_clipping/sampling/test_usage.py"
MEMORY = "tests/dp_clipping/sampling/test_memory_manager.py"
COLLATE = "tests/dp_clipping/sampling/test_collate.py"
SPLIT = "tests/dp_clipping/distributed/test_split_norms.py"
REDUCE = "tests/dp_clipping/distributed/test_gradient_reduce.py"
GLOBAL = "tests/dp_clipping/distributed/test_global_norms.py"
LEDGER = "tests/dp_clipping/accounting/test_ledger.py"
CONTRIBUTIONS = "tests/dp_clipping/verification/test_contributions.py"
MECHANISMS = "tests/dp_clipping/noise/test_mechanisms.py"
SAMPLINGS = "tests/dp_clipping/test_samplings.py"
SCHEMES = "tests/dp_clipping/sampling/test_schemes.py"
BINS = "tests/dp_clipping/accounting/test_balls_in_bins.py"
TRUNCATED = "tests/dp_clipping/accounting/test_truncated_poisson.py"
CYCLIC = "tests/dp_clipping/accounting/test_cyclic.py"
ALONE = "tests/dp_clipping/layers/registered/test_one_alone.py"
OF_USERS = "tests/dp_clipping/layers/registered/test_module.py"
STATE = "tests/dp_clipping/step/test_state.py"

ROWS = [
    # ---- clipping
    ("norms without their margin", "clipping/coefficients.py",
     "norms = squared_bounds.sqrt() * margin", "norms = squared_bounds.sqrt()", COEFFICIENTS),
    ("small gradients are scaled up", "clipping/coefficients.py",
     "(clip_norms / norms).clamp(max=1.0)", "(clip_norms / norms)", COEFFICIENTS),
    ("a sample that is not finite counts", "clipping/coefficients.py",
     "torch.where(finite_samples(squared_bounds), scale, 0.0)", "scale", COEFFICIENTS),
    ("one finite group is enough", "clipping/coefficients.py",
     "torch.isfinite(squared_bounds).all(dim=0)", "torch.isfinite(squared_bounds).any(dim=0)",
     COEFFICIENTS),
    ("gamma is subtracted", "clipping/coefficients.py",
     "(clip_norms / (norms + gamma))", "(clip_norms / (norms - gamma))", COEFFICIENTS),
    ("thresholds of groups are C over K", "clipping/coefficients.py",
     "groups**0.5", "groups", COEFFICIENTS),
    ("no allowance for Gram products", "clipping/norms.py",
     "(squared + gram_error * scale.square()).sqrt()", "squared.sqrt()", NORMS),
    ("no allowance for sums", "clipping/norms.py", " + sum_error * scale", "", NORMS),
    ("all groups are one", "clipping/norms.py",
     "numbers = tuple(self._groups[p] for p in self._of) or (0,)",
     "numbers = tuple(0 for p in self._of) or (0,)", NORMS),
    ("minus infinity is zero", "clipping/norms.py",
     "torch.where(squared == -torch.inf, torch.inf, squared).clamp_min(0)", "squared.clamp_min(0)",
     NORMS),
    ("squares of the last piece are lost", "clipping/accumulation.py",
     "parts = [rows[:, :whole].unflatten(1, (-1, PIECE)), rows[:, whole:].unsqueeze(1)]",
     "parts = [rows[:, :whole].unflatten(1, (-1, PIECE))]", ACCUMULATION),
    ("coefficients are rounded to nearest", "clipping/accumulation.py",
     "return torch.where(too_large, below, rounded)", "return rounded", ACCUMULATION),
    ("clipped samples are those at the threshold too", "clipping/statistics.py",
     "squares.sqrt() > bounds[:, None]", "squares.sqrt() >= bounds[:, None]", STATISTICS),
    # ---- layers
    ("a weight's gradient is a mean over tokens", "layers/projection.py",
     "return multiply(left.mT, right)", "return multiply(left.mT, right) / left.shape[1]", LINEAR),
    ("cross terms of tokens are dropped", "layers/linear_factors.py",
     "squared = (gram_a * gram_y).sum((1, 2), dtype=torch.float64)",
     "squared = (gram_a * gram_y).diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)", FACTORS),
    ("a Gram matrix of other activations", "layers/linear_factors.py",
     "if not same:", "if self._of is None:", FACTORS),
    ("accumulated sums are not weighted", "layers/linear_factors.py",
     "weighted_sum(weights.only(part), gradients)", "gradients.sum(0)", FACTORS),
    ("equal tokens are normed apart", "layers/embedding/factors.py",
     "rows = (number + first).flatten()",
     "rows = (torch.arange(tokens, device=first.device) + first).flatten()", EMBEDDING),
    ("padding trains its row", "layers/embedding/factors.py",
     "gy.masked_fill((ids == padding_idx).unsqueeze(-1), 0)", "gy", EMBEDDING),
    ("a norm layer's bias is weighted by its input", "layers/norm.py",
     "normalized = (x.to(dtype) - mean.to(dtype)) * rstd.to(dtype)",
     "normalized = x.to(dtype) * rstd.to(dtype)", NORM),
    ("an input gradient without its mean", "layers/norm.py",
     "(rstd * (scaled - normalized * mean)).to(x.dtype)", "(rstd * scaled).to(x.dtype)", NORM),
    ("rescaled sums exceed by rounding", "layers/low_precision_sums.py",
     "coefficients * (1 - ROUNDING_SLACK), coefficients)", "coefficients * 1.01, coefficients)",
     SCALED),
    ("an excess on another rank is not seen", "layers/low_precision_sums.py",
     "bounds = over_parts(scale.square() * others.bounds() + scaled.bounds())",
     "bounds = scale.square() * others.bounds() + scaled.bounds()", SCALED),
    ("a shared output gradient is scaled twice", "layers/low_precision_sums.py",
     "if seen.setdefault(storage, use) != use or 0 in y.stride():", "if False:", SCALED),
    # ---- step
    ("coefficients of other groups", "step/plain_backend.py",
     "weights = self._weights[self.context.capture.groups[parameter]]",
     "weights = self._weights[0]",
     STEP),
    ("bad samples stay in the sum", "step/plain_backend.py",
     "self.kept[parameter] = self._only_good(saved)", "pass",
     "tests/dp_clipping/clipping/test_exactness.py", "only_poisoned or counted_until"),
    ("rows that are no samples have coefficients", "step/plain_backend.py",
     "scale = scale.masked_fill(self.padding, 0.0)", "pass", MEMORY, "training_is_that_without"),
    ("rows that are no samples have norms", "step/private_step.py",
     "found.first(samples) if self.padding is None else found", "found", MEMORY,
     "what_is_printed"),
    ("rows that are no samples have losses", "losses/private_loss.py",
     "self._losses[: self._session.real], self._session.fill",
     "self._losses, self._session.fill", MEMORY, "what_is_printed"),
    ("what fills up a unit is in its gradient", "step/private_step.py",
     "losses = losses.masked_fill(self.fill, 0)", "pass", UNITS, "the_definition"),
    ("examples of a unit are clipped one by one", "layers/handle.py",
     "return 1 if self.private_step is None else self.private_step.examples_per_unit", "return 1",
     UNITS, "the_definition"),
    ("units are sampled at the rate of examples", "arguments/checks.py",
     "len(loader) if units is None else batches_of(loader, len(units), units.size)",
     "len(loader)", UNITS, "account"),
    ("rows that are no samples follow the first sample", "step/forward_backward.py",
     "device=self.capture.trigger.device) >= real",
     "device=self.capture.trigger.device) > real", MEMORY, "training_is_that_without"),
    ("norms that are returned are squared", "step/plain_backend.py",
     "BatchNorms(squared.sum(0).sqrt()", "BatchNorms(squared.sum(0)", STEP),
    ("unclipped sums", "step/plain_backend.py",
     "total = weighted_sum(weights, saved)", "total = saved.sum(0)", STEP),
    ("a second microbatch replaces the first", "step/gradient_buffer.py",
     "grad.add_(", "grad.copy_(", BUFFER),
    ("the second backward draws anew", "step/rng_replay.py",
     "torch.set_rng_state(self._cpu)", "pass", REPLAY),
    ("noisy sums may be noisy again", "step/state.py",
     "WITH_SUMS = (Phase.OPEN, Phase.REDUCED)",
     "WITH_SUMS = (Phase.OPEN, Phase.REDUCED, Phase.NOISY)", STATE),
    ("a dropped step keeps its norms", "step/state.py",
     "        self.norms = []\n        self.usage.give_back()", "        self.usage.give_back()",
     STATE),
    # ---- noise
    ("noise is subtracted from nothing", "noise/gaussian.py",
     "noisy = z.to(total.dtype).mul_(std).add_(total[part])", "noisy = z.to(total.dtype).mul_(std)",
     GAUSSIAN),
    ("noise is not divided", "noise/gaussian.py",
     "torch.div(noisy, divisor, out=out[part])", "out[part] = total[part] / divisor + z * std",
     GAUSSIAN),
    ("every step has the same noise", "noise/gaussian.py",
     'step.to_bytes(8, "little") + share', 'bytes(8) + share', GAUSSIAN),
    ("all shares have the same noise", "noise/gaussian.py",
     ' + share.to_bytes(8, "little")', ' + bytes(8)', GAUSSIAN),
    ("all parameters have the same noise", "noise/gaussian.py",
     'own.update(parameter.encode())', 'own.update(b"")', GAUSSIAN),
    ("noise and sampling have one key", "noise/keys.py",
     'self._derive(b"sampling key")', 'self._derive(b"noise key")', KEYS),
    ("each rank has its own key", "noise/keys.py",
     "dist.broadcast(message, group=group, group_src=0)", "pass", KEYS),
    ("the threshold moves the other way", "noise/adaptive_threshold.py",
     "exponent = -self.learning_rate", "exponent = self.learning_rate", ADAPTIVE),
    ("counts have no noise", "noise/adaptive_threshold.py",
     "(self.count_std * z if noisy else 0.0)", "0.0", ADAPTIVE),
    ("a count is released twice", "noise/adaptive_threshold.py",
     "if step < self.next_step:", "if False:", ADAPTIVE),
    # ---- sampling
    ("a rate is rounded up", "sampling/poisson.py",
     "int(sample_rate * 2**64)", "int(sample_rate * 2**64) + 2**54", POISSON),
    ("every batch is the same", "sampling/words.py", "counter=number << 64", "counter=0", POISSON),
    ("ranks draw the same samples", "sampling/poisson.py",
     "units[units % ranks == rank]", "units[units % ranks == 0]", POISSON),
    ("a Poisson batch comes again after a resume", "sampling/loader.py",
     "self.position = number + 1", "self.position = number", LOADER),
    ("a batch may be used twice", "sampling/usage.py", "self.left -= samples", "pass", USAGE),
    ("an empty batch has the sample's storage", "sampling/collate.py",
     "one.new_empty(shape)", "one.narrow(dim, 0, 0)", COLLATE),
    # ---- the account
    ("batches of another loader are Poisson batches", "runs/accounts.py",
     "            run.other_batches += 1\n", "            pass\n", ACCOUNTS),
    # ---- noise mechanisms of users
    ("a registered mechanism's noise is Gaussian", "noise/add_noise.py",
     "stream, std, divisor, offset, place, values)", "stream, std, divisor, offset, place)",
     MECHANISMS),
    ("epsilon of a registered mechanism is Gaussian", "runs/accounts.py",
     "self._account.epsilon(delta, self._mechanism.epsilon)", "self._account.epsilon(delta)",
     MECHANISMS),
    ("an account too low is taken", "noise/mechanisms.py",
     "if stated < 0.999 * least and stated < math.inf:", "if False:", MECHANISMS),
    ("numbers of a counter are skipped", "noise/gaussian.py",
     "width = (run.length + 2 * each - 2) // each", "width = (run.length + each - 2) // each",
     "tests/dp_clipping/noise/test_gaussian.py"),
    ("half of the random words are used", "noise/gaussian.py",
     "for i in (0, 2)]\n    return torch.stack(pairs, 1)",
     "for i in (0, 0)]\n    return torch.stack(pairs, 1)", MECHANISMS),
    ("Gaussian steps count as a registered mechanism's", "accounting/mechanism.py",
     "before = DEFAULT if history else self", "before = self", MECHANISMS),
    ("a checkpoint goes on under another mechanism", "checkpoint/compatibility.py",
     ', "noise_mechanism": "gaussian"', "", MECHANISMS),
    # ---- other samplings
    ("an unused batch is lost", "sampling/loader.py",
     "self.usage.unused_from if in_order else self.position", "self.position", SAMPLINGS,
     "comes_again"),
    ("a step out of order is taken", "checkpoint/run.py",
     "if in_order and number != self.next_batch:", "if False:", SAMPLINGS, "out_of_order"),
    ("new keys go on in the middle of an epoch", "checkpoint/restore.py",
     "rekey(run.keys.sampling, run.start[0])", "rekey(run.keys.sampling)", SAMPLINGS, "new_keys"),
    ("steps of two keys are those of one", "accounting/ledger.py",
     "of([list(part) for _, part in self._parts.values()], delta)",
     "of([list(self.history)], delta)", SAMPLINGS, "two_runs"),
    ("a checkpoint goes on under another sampling", "checkpoint/compatibility.py",
     '"sampling": "poisson", ', "", SAMPLINGS, "another_sampling"),
    ("mass is rounded down", "accounting/balls_in_bins.py",
     "found.mass * np.clip((found.values - low) / (high - low), 0, 1)", "0 * found.mass", BINS),
    ("steps to come are not there", "accounting/balls_in_bins.py",
     "found = added(found, constant(batches - steps))", "pass", BINS),
    ("the last epoch's noise counts for all", "accounting/balls_in_bins.py",
     "min(sigma, here)", "here", BINS),
    ("bins are the same in each epoch", "sampling/schemes.py",
     'b"balls in bins", epoch', 'b"balls in bins", 0', SCHEMES),
    ("the first units of a batch are kept", "sampling/schemes.py",
     "drawn[torch.from_numpy(np.sort(kept))]", "drawn[: self.max_batch_size]", SCHEMES),
    ("a cyclic batch has neighbours of the data", "sampling/schemes.py",
     'np.argsort(words(key, b"cyclic", 0, self.units), kind="stable")', "np.arange(self.units)",
     SCHEMES),
    ("a neighbour has one unit less only", "accounting/truncated_poisson.py",
     "in (units, units + 1)", "in (units,)", TRUNCATED),
    ("a place in the cycle is the mean one", "accounting/cyclic.py",
     ".max(initial=0.0)", ".mean()", CYCLIC),
    # ---- clipping functions of users
    ("a gradient whose squares underflow is scaled up", "clipping/coefficients.py",
     "bound * clip_norms / (norms + LOST)", "bound * clip_norms / (norms + 1e-300)", COEFFICIENTS),
    ("a function of another bound is the same", "clipping/coefficients.py",
     "    values = [bound]\n", "    values = []\n", COEFFICIENTS),
    ("a function of other values is the same", "clipping/coefficients.py",
     "values = [bound]\n    for limit in LIMITS:", "values = [bound]\n    for limit in ():",
     COEFFICIENTS),
    ("what is measured has no NaN", "verification/contributions.py",
     ', float("nan"),\n', ",\n", CONTRIBUTIONS),
    ("a sample alone is not compared", "verification/contributions.py",
     "if not same.all():", "if False:", CONTRIBUTIONS),
    # ---- layers of users
    ("a registered function is not compared", "layers/registered/module.py",
     "refuse_wrong(self, gradient, tensors, found)", "pass", ALONE),
    ("gradients of zero count as compared", "layers/registered/one_alone.py",
     "use.handle.checks += 0 if is_zero else 1", "use.handle.checks += 1", ALONE),
    ("a registered function is compared once", "layers/registered/one_alone.py",
     "return handle.backwards & (handle.backwards - 1) == 0", "return False", ALONE),
    ("one sample is compared with another", "layers/registered/one_alone.py",
     "got = use.row(found[name], i)", "got = use.row(found[name], (i + 1) % rows)", ALONE),
    ("what cancels is taken for a mistake", "layers/registered/one_alone.py",
     "+ ROUNDINGS * rounding", "+ 0 * rounding", ALONE),
    ("products lose tokens", "layers/registered/module.py",
     "g = LinearFactors(a, y, False)", "g = LinearFactors(a[:, :1], y[:, :1], False)", OF_USERS),
    ("changes in place go unnoticed", "layers/registered/module.py",
     "return y.detach()", "return y.data", OF_USERS),
    ("examples of a unit are averaged", "layers/registered/module.py",
     "g = _units(g, k).sum(1, dtype=accumulation_dtype(g.dtype))", "g = _units(g, k).mean(1)",
     UNITS, "registered"),
    # ---- distributed
    ("shared parameters are counted on every rank", "distributed/norm_reduce.py",
     "return not replicated or self.tensor.rank == 0", "return True", SPLIT),
    ("ranks that differ are not noticed", "distributed/split_norms.py",
     "return squares, torch.where(differs, torch.inf, bounds)", "return squares, bounds", SPLIT),
    ("bounds stay on their rank", "distributed/split_norms.py",
     "return self._reducer.reduce(bounds[None]).wait()[0]", "return bounds", SPLIT),
    ("shards add up over no ranks", "distributed/gradient_reduce.py",
     "self._sums[parameter].add_(shard.view_as(self._sums[parameter]))", "pass", REDUCE),
    ("a shard of another rank", "distributed/gradient_reduce.py",
     "rows[row, first : first + piece.numel()] = piece.reshape(-1)",
     "rows[world - 1 - row, first : first + piece.numel()] = piece.reshape(-1)", REDUCE),
    ("norms of ranks lie over each other", "distributed/global_norms.py",
     "offset = sum(self.sizes[: reducer.data.rank])", "offset = 0", GLOBAL),
    # ---- checkpoint ledger
    ("released steps are forgotten by a load", "accounting/ledger.py",
     "lost[key] = first, after(part, shared(part, there))", "lost[key] = first, []", LEDGER),
    ("a repeated step may have another noise", "accounting/ledger.py",
     "if not same or made not in (None, step.digest):", "if False:", LEDGER),
    ("equal neighbours are counted once", "accounting/ledger.py",
     "            steps += whole.pop()[2]", "            whole.pop()", LEDGER),
    ("a step too many is dropped", "accounting/ledger.py",
     "left = number - min(number, steps)", "left = number - min(number, steps + 1)", LEDGER),
]  # fmt: skip
