"""Why fewer, larger messages are faster, in numbers of the profile that was just recorded."""

from collections.abc import Sequence

from ddp_by_hand.lm.exchange import Network, plan
from ddp_by_hand.lm.memory import MIB
from ddp_by_hand.lm.shape import Shape
from ddp_by_hand.tracing import Trace, collective_seconds


def describe_messages(traces: Sequence[Trace]) -> list[str]:
    """Says what the messages of `ddp` cost, and what the larger ones of `ddp_bucketed` would.

    The all-reduces of `ddp` come one after the other, with nothing beside them. So they tell what
    each costs whatever its size, and what each of its bytes costs.

    Args:
        traces: of `ddp`, one of each rank.

    Returns:
        Three lines; none if no call was seen to cost anything beside its bytes, as where other
        programs disturbed the run.
    """
    shape, ranks = Shape.of(traces[0].configuration), len(traces)
    single, bucketed = (plan(variant, shape).nbytes for variant in ("ddp", "ddp_bucketed"))
    try:
        lasted = collective_seconds(traces, len(single))
    except ValueError:  # something else communicated too
        return []
    samples = list(zip(single, lasted, strict=True))
    links = Network(0.0, 1.0, ranks, 0.0, 1.0).fitted(samples, ranks)
    call = 1e3 * links.seconds("all_reduce", 0, ranks)
    if not call:
        return []
    mib, size = 1e3 * links.seconds("all_reduce", MIB, ranks) - call, sum(single) / MIB

    def cost(variant: str, calls: int) -> str:
        total = calls * call + size * mib
        parts = f"{calls:>3} × {call:.2g} ms + {size:.3g} MiB × {mib:.2g} ms/MiB"
        return f"  {variant:<12} {parts} = {total:.3g} ms"

    return [
        "Fewer, larger messages are faster: each takes time besides that of its bytes. Here",
        cost("ddp", len(single)),
        cost("ddp_bucketed", len(bucketed)),
    ]
