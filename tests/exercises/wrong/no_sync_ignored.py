"""The hook does not look."""

import torch.distributed as dist

from tests.exercises.solutions import no_sync


class AccumulatingDDP(no_sync.AccumulatingDDP):
    def start_reduction(self, parameter):
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))
