"""The end of any block switches synchronisation on."""

from contextlib import contextmanager

from tests.exercises.solutions import no_sync


class AccumulatingDDP(no_sync.AccumulatingDDP):
    @contextmanager
    def no_sync(self):
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True
