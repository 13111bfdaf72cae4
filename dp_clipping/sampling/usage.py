"""A sample of a draw is in one sum of one step, once: what the loader handed out is counted."""

from collections.abc import Callable


class SampleUsage:
    """Samples in the user's hands that no backward has used yet; the loader and the model share it.

    A batch whose backward ran three times would move a sum by 3C, and two draws in one step would
    be counted as one. A batch may be used in parts. What is handed out replaces what was before.

    Without a Poisson loader only the samples of a step are counted: `batch_size` of them are a
    batch, and those of several batches would be divided by the size of one.

    Attributes:
        batch_size: of a loader that makes no Poisson draws; None: not known.
        handed: samples of the (micro)batch in the user's hands; None without a Poisson loader, and
            where its draws are taken behind its back: then nothing is counted.
        left: those of them that no backward has used.
        uses: backwards since they were handed out; all ranks count alike.
        steps: how often something was released.
        is_unused: a draw of the iteration in progress was handed out and is in no step yet.
        holds_dummy: what was handed out is the made-up sample of `rand_on_empty`. Its gradient must
            be masked: were it added, taking away the only real sample of a draw could move the sum
            by 2C.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.handed: int | None = None
        self.left = 0
        self._in_step = 0
        self._more_to_come = False
        self.uses = 0
        self.steps = 0
        self.is_unused = False
        self.holds_dummy = False

    def begin_iteration(self) -> None:
        """Forgets a draw of an iteration that was left: it may stay unused."""
        self.is_unused = False

    def hand_over(self, samples: int, is_dummy: bool = False) -> None:
        self.handed = self.left = samples
        self.holds_dummy = is_dummy
        self.uses = 0
        self.is_unused = True

    def use(
        self, samples: int, on_any_rank: Callable[[bool], bool] = bool, *, part: bool = False
    ) -> None:
        """Counts samples that a backward is about to add. Raises RuntimeError if they are too many.

        `part`: of a batch of which more is to come, as `signal_skip_step` has said.

        `on_any_rank` asks the others, from the second backward of a batch on: one that has no
        samples would go on, and wait for those that raise.
        """
        if self.handed is None:
            self._use_of_batch(samples, part)
            return
        too_many = samples > self.left
        elsewhere = bool(self.uses) and on_any_rank(too_many)
        if too_many or elsewhere:
            what = "samples that another rank has used already"
            if too_many:
                what = f"{samples} samples, and of the {self.handed} that the loader handed out "
                what += f"{self.left} are unused"
            raise RuntimeError(
                f"backward of {what}: a sample is in one backward of one step only, so take a new "
                "batch for each step, add up losses of one batch before one backward(), and give "
                "several views of a sample as one sample"
            )
        self.uses += 1
        self.left -= samples

    def _use_of_batch(self, samples: int, part: bool) -> None:
        before, declared = self._in_step, self._more_to_come
        fits = self.batch_size is None or before + samples <= self.batch_size
        if fits or declared or not before:
            self._in_step, self._more_to_come = before + samples, part
            return
        raise RuntimeError(
            f"backward of {samples} samples in a step that has {before} already, and the loader's "
            f"batch has {self.batch_size}: the gradient would be divided, and the step counted, as "
            "if it were one batch; let the loader's batch_size be that of a step and split it with "
            "BatchMemoryManager(data_loader=.., max_physical_batch_size=.., optimizer=..)"
        )

    def give_back(self) -> None:
        """Allows the batch of a step whose sums were dropped to be used again."""
        self._in_step = 0
        self.left = self.handed or 0

    def close(self) -> None:
        """Ends a step about to be released; what is in the user's hands is refused from here on."""
        self.steps += 1
        self.take_back()

    def take_back(self) -> None:
        """Refuses what is in the user's hands from here on."""
        self._in_step = 0
        if self.handed is not None:
            self.handed = self.left = 0
        self.is_unused = False

    def forget(self) -> None:
        """Draws are taken without the loader (Opacus's BatchMemoryManager): nothing is counted."""
        self.handed = None
        self.is_unused = False
