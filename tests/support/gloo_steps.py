"""Real traces of two gloo processes: `python tests/support/gloo_steps.py FOLDER [--trim]`.

Writes `{variant}_rank_{rank}_trace.json` for a synchronous and an overlapped all-reduce of a small
model. With --trim it keeps what a reader needs of rank 0's, small enough to be committed; that is
how `tests/tracing/fixtures/` was made. A script of its own, because worker processes import their
main module.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_by_hand.tracing import phase, profile

VARIANTS = ("synchronous", "overlapped")
LAYERS, WIDTH, STEPS = 3, 256, 2


def step(variant: str, net: nn.Module, optimizer, pending: list) -> None:
    with phase("forward_pass"):
        loss = net(torch.ones(512, WIDTH)).square().mean()
    with phase("backward_pass"):
        loss.backward()
    with phase("gradient_sync"):
        for parameter in net.parameters() if variant == "synchronous" else ():
            dist.all_reduce(parameter.grad)
        while pending:
            pending.pop().wait()
    with phase("optimizer_step"):
        optimizer.step()
        optimizer.zero_grad()


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for variant in VARIANTS:
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        optimizer, pending = torch.optim.SGD(net.parameters(), lr=1e-3), []

        def start(parameter: nn.Parameter, pending: list = pending) -> None:
            pending.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in net.parameters() if variant == "overlapped" else ():
            parameter.register_post_accumulate_grad_hook(start)
        for _ in range(STEPS):
            step(variant, net, optimizer, pending)  # first steps allocate and connect
        dist.barrier()
        path = Path(folder) / f"{variant}_rank_{rank}_trace.json"
        with profile(path, device_type="cpu"), phase("epoch_0_training_lr_0.001"):
            for _ in range(STEPS):
                step(variant, net, optimizer, pending)
    dist.barrier()
    dist.destroy_process_group()
    del optimizer
    gc.collect()  # or a gloo process that built an optimizer may abort at exit


def trim(path: Path) -> None:
    """Keep the timed operators and ranges, without their arguments, from time zero."""
    document = json.loads(path.read_text())
    timed = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    timed = [e for e in timed if e["cat"] in ("cpu_op", "user_annotation")]
    zero = min(e["ts"] for e in timed)
    for event in timed:
        event["ts"] = round(event["ts"] - zero, 3)
        event.pop("args", None)
    kept = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2}}
    lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in timed)
    path.write_text(f'{json.dumps(kept)[:-1]}, "traceEvents": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(train, (str(target),), nprocs=2)
    if "--trim" in sys.argv:
        for name in VARIANTS:
            trim(target / f"{name}_rank_0_trace.json")
