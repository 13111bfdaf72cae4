"""The copy-engine variant: beside `ddp_bucketed` with ranks that are late; where it is refused."""

import random
import time

import pytest
import torch

from ddp.copy_engine import memory, peer_memory
from ddp.copy_engine.exchange import chunk_of
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.conftest import COPY_ENGINE, CPU_COPY_ENGINE
from tests.support.beside import Branches, branches_loss, wrapped


def dawdle(context: Context, choose: random.Random) -> None:
    """One rank, now and then, is late: on a GPU its kernels as well as its Python."""
    late, how_long = choose.randrange(2 * context.world_size), choose.uniform(0, 0.004)
    if context.rank == late:
        time.sleep(how_long)
        if context.device.type == "cuda":
            torch.cuda._sleep(int(how_long * 1e9))


def beside_bucketed(context: Context, name: str, steps: int) -> None:
    """The same numbers as `ddp_bucketed`, step after step, in buckets and pieces of odd sizes."""
    models = []
    for variant in (name, "ddp_bucketed"):
        torch.manual_seed(0)
        module = Branches(count=5, width=23)
        models.append(wrapped(context, variant, module, bucket_size_mb=5000 / (1 << 20)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in models]
    choose = random.Random(7)  # the same on every rank
    for step in range(steps):
        for model in models:
            dawdle(context, choose)
            loss = branches_loss(step, lambda r: [0, 1, 2, 3, 4])(model, context.rank)
            dawdle(context, choose)
            loss.backward()
            dawdle(context, choose)
            model.finish_gradient_synchronization()
        for (key, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, k=key, s=step: f"{s} {k}: {m}"
            )
        set_to_none = choose.random() < 0.5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def in_pieces(context: Context, name: str) -> None:
    """Chunks larger than the scratch memory are pulled piece by piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PIECE_BYTES", 2048)
        beside_bucketed(context, name, 3)


@pytest.mark.parametrize(("body", "more"), [(beside_bucketed, [30]), (in_pieces, [])])
def test_many_steps_with_late_ranks(cpu_ranks, body, more):
    cpu_ranks.run(3, body, CPU_COPY_ENGINE, *more)


@pytest.mark.gpu
def test_many_steps_with_late_ranks_on_gpus(gpu_ranks):
    gpu_ranks.run(gpu_ranks.size, beside_bucketed, COPY_ENGINE, 300)
    gpu_ranks.run(gpu_ranks.size, in_pieces, COPY_ENGINE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000, 12_345])
def test_chunks_cover_the_bucket_once(world_size, numel):
    bounds = [chunk_of(rank, numel, world_size) for rank in range(world_size)]
    assert [i for low, high in bounds for i in range(low, high)] == list(range(numel))
    assert max(high - low for low, high in bounds) <= -(-numel // world_size) + 127


def on_hosts(context: Context, names: list[str], gpus_see_each_other: bool) -> str | None:
    """The agreed reason, where only the facts about the machine are replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_own_obstacle", lambda device: None)
        patch.setattr(peer_memory.socket, "gethostname", lambda: names[context.rank])
        patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: gpus_see_each_other)
        return peer_memory.why_not(torch.device("cuda", context.rank), context.group)


@pytest.mark.parametrize(
    ("hosts", "gpus_see_each_other", "reason"),
    [
        (["a", "a", "b"], True, "needs all ranks on one host, and they are on several"),
        (["a", "a"], False, "needs peer access from GPU 0 to GPU 1"),
        (["a", "a"], True, None),
    ],
)
def test_it_says_on_every_rank_why_it_is_refused(cpu_ranks, hosts, gpus_see_each_other, reason):
    answers = cpu_ranks.run(len(hosts), on_hosts, hosts, gpus_see_each_other)
    assert set(answers) == {reason}
