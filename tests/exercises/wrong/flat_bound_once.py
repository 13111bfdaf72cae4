"""The views are bound in the first step only: zero_grad() takes them away for good."""

from tests.exercises.solutions import flat


class FlatDDP(flat.FlatDDP):
    bound = ()

    def fill(self, flat, bucket):
        if flat.data_ptr() not in self.bound:
            super().fill(flat, bucket)
            self.bound = (*self.bound, flat.data_ptr())
