"""Whether peer memory can be used, as all ranks agree on it."""

import pytest
import torch

from ddp.copy_engine import peer_memory
from ddp_by_hand.lm.rank_pool import Context


def on_hosts(context: Context, names: list[str], gpus_see_each_other: bool) -> str | None:
    """The agreed reason, where only the facts about the machine are replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_own_obstacle", lambda device: None)
        patch.setattr(peer_memory.socket, "gethostname", lambda: names[context.rank])
        patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: gpus_see_each_other)
        return peer_memory.why_not(torch.device("cuda", context.rank), context.group)


def test_copy_engine_refuses_several_hosts_on_every_rank(cpu_ranks):
    answers = cpu_ranks.run(3, on_hosts, ["a", "a", "b"], True)
    assert set(answers) == {"needs all ranks on one host, and they are on several"}


def test_copy_engine_refuses_gpus_without_peer_access(cpu_ranks):
    assert set(cpu_ranks.run(2, on_hosts, ["a", "a"], False)) == {
        "needs peer access from GPU 0 to GPU 1"
    }
    assert set(cpu_ranks.run(2, on_hosts, ["a", "a"], True)) == {None}
