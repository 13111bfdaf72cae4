"""Everything is started in finish: right, and nothing overlaps."""

import torch

from tests.exercises.solutions import hooks


class OverlapDDP(hooks.OverlapDDP):
    def watch(self, parameter):
        pass

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            self.start_reduction(parameter)
        super().finish_gradient_synchronization()
