"""What was ready in the first step is taken for ready in the next."""

from tests.exercises.solutions import order


class OrderedDDP(order.OrderedDDP):
    def begin_step(self):
        self.ready = getattr(self, "ready", set())
        self.handles = []
