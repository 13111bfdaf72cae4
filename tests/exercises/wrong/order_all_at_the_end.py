"""One order, because everything is started in finish."""

import torch

from tests.exercises.solutions import order


class OrderedDDP(order.OrderedDDP):
    def gradient_ready(self, parameter):
        pass

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.order:
            super().gradient_ready(parameter)
        super().finish_gradient_synchronization()
