"""Prints what comparing settings costs the host in a step.

`python -m tests.support.agreement_cost`: two gloo ranks of this machine, which begin each step
together.
"""

import time
from statistics import quantiles

import torch.distributed as dist

from ddp_by_hand.lm.rank_pool import Context, RankPool
from dp_clipping.distributed.agreement import Agreement

STEPS, FIRST = 500, 50
COMPUTES = 0.005  # seconds between a step's first backward and its optimizer.step()
SETTINGS = {
    "noise_multiplier": 1.0, "expected_batch_size": 64.0, "loss_reduction": "mean",
    "max_grad_norm": 1.0, "grad_sample_mode": "flash_bookkeeping", "clipping": "flat",
    "clipping_function": "abadi", "gamma": 0.01, "key fingerprint": "00000000",
}  # fmt: skip


def seconds(context: Context, early: bool) -> list[float]:
    """That the host spends in each step."""
    agreement, spent = Agreement(context.group, early=early), []
    for step in range(STEPS):
        dist.barrier(context.group)
        settings = SETTINGS | {"steps": step}
        start = time.perf_counter()
        agreement.begin(settings)
        begun = time.perf_counter() - start
        time.sleep(COMPUTES if early else 0)
        start = time.perf_counter()
        agreement.check(step, settings)
        spent.append(begun + time.perf_counter() - start)
    return spent[FIRST:]


if __name__ == "__main__":
    pool = RankPool(2)
    for early, where in ((False, "in step() (CPU)"), (True, "from the first backward on (GPU)")):
        first, middle, last = quantiles(pool.run(2, seconds, early)[0], n=4)
        print(
            f"{where}: {1e6 * middle:.0f} us a step (quartiles {1e6 * first:.0f}, {1e6 * last:.0f})"
        )
    pool.close()
