"""Several backwards, one reduction: `no_sync`, two synchronising backwards, no zeroing."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss
from tests.support.on_ranks import on_ranks

PROGRAMS = {
    "two_synchronising_backwards": "backward backward finish zero",
    "no_sync_then_synchronise": "( backward backward ) backward finish zero",
    "never_zeroed": "( backward ) backward finish",
    "cleared_behind_no_sync": "backward finish ( backward ) zero backward finish zero",
    "several_forwards": "forward forward forward together finish zero",
    "forward_behind_finish": "backward finish forward compare together finish zero",
    "second_finish": "finish backward finish again zero",
    "exception_in_no_sync": "raise backward finish zero ( ( ) ) backward finish zero",
    "no_sync_around_a_forward": "( forward ) each own zero backward finish zero",
    "no_sync_around_a_backward": "forward ( each ) finish zero",
    "no_sync_around_one_of_two_forwards": "forward ( forward together ) finish zero",
    "eval_mode": "eval backward finish zero eval forward ( each ) finish zero train",
    "eval_mode_behind_a_local_backward": "( backward ) eval backward finish train backward finish "
    "zero",
}
# PyTorch's reducer is done, or not prepared, at the second backward of these.
NOT_FOR_PYTORCH = {
    "no_sync_behind_a_synchronising_backward": "backward ( backward ) finish zero",
    "two_forwards_then_two_backwards": "forward forward each finish zero",
    "two_backwards_through_one_graph": "forward forward keep each finish zero",
}
PROGRAMS |= NOT_FOR_PYTORCH


class Program(Beside):
    """Runs programs of words. Each forward is that of a chain, with other data.

    ( )         words between them are under `no_sync`
    raise       an exception under `no_sync`
    backward    a forward and its backward
    forward     a forward, whose backward comes later
    together    the backward of the forwards so far, as one
    each        the backward of each of them
    keep        the same, and their graphs are kept for another one
    finish      the gradients are those of all ranks
    compare     the same, without a finish
    again       a second finish, on one rank: no collective, and nothing changes
    own         finish, after which the gradients are this rank's own: nothing has travelled
    zero        zeroes the gradients, in the second turn in place
    eval train  the mode of the network
    """

    def run(self, program: str, turns: int = 3) -> None:
        self.seed, self.losses, self.contexts = 0, {}, []
        for self.turn in range(turns):
            self.seeds: list[int] = []  # of this turn
            for word in program.split():
                getattr(self, {"(": "enter", ")": "leave", "raise": "fail"}.get(word, word))()

    def enter(self) -> None:
        self.contexts.append(self.model.no_sync())
        self.contexts[-1].__enter__()

    def leave(self) -> None:
        self.contexts.pop().__exit__(None, None, None)

    def fail(self) -> None:
        with pytest.raises(KeyError), self.model.no_sync():
            raise KeyError

    def forward(self) -> None:
        self.seed += 1
        self.seeds.append(self.seed)
        self.losses[self.seed] = chain_loss(self.seed)(self.model, self.rank)

    def backward(self) -> None:
        self.forward()
        self.together()

    def together(self) -> None:
        self._backward(sum(self.losses.values()))

    def each(self) -> None:
        self._backward(*self.losses.values())

    def keep(self) -> None:
        self._backward(*self.losses.values(), keep=True)

    def _backward(self, *losses: Tensor, keep: bool = False) -> None:
        for loss in losses:
            loss.backward(retain_graph=keep)
        for seed in self.losses:
            self.reference_backward(chain_loss(seed))
        if not keep:
            self.losses.clear()

    def again(self) -> None:
        if self.rank == 0:
            self.model.finish_gradient_synchronization()
        self.compare()

    def own(self) -> None:
        self.model.finish_gradient_synchronization()
        loss = sum(chain_loss(seed)(self.reference, self.rank) for seed in self.seeds)
        gradients = torch.autograd.grad(loss, list(self.reference.parameters()))
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, gradient)

    def zero(self) -> None:
        self.zero_grad(set_to_none=self.turn != 1)

    def eval(self) -> None:
        self.model.eval()

    def train(self) -> None:
        self.model.train()


def accumulated(context: Context, name: str, *programs: str) -> None:
    for program in programs:
        for reduce in ("mean", "sum"):
            Program(context, name, reduce=reduce).run(PROGRAMS[program])


@pytest.mark.parametrize("program", PROGRAMS)
def test_accumulation(ranks, implementation, program):
    ranks.run(2, accumulated, implementation, program)


@on_ranks(2)
def test_backwards_that_pytorchs_reducer_leaves_to_torch_ddp(context):
    """Reduces them itself, once."""
    accumulated(context, "torch_ddp", *NOT_FOR_PYTORCH)


@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulation_on_other_numbers_of_ranks(ranks, implementation, world_size):
    ranks.run(world_size, accumulated, implementation, "no_sync_then_synchronise")


class CheckpointedChain(Chain):
    def forward(self, x):
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x


def activation_checkpointing(context: Context, name: str) -> None:
    for unused in (False, True):
        pair = Program(context, name, CheckpointedChain(), find_unused_parameters=unused)
        pair.run("backward finish zero")


def there_before_wrap(context: Context, name: str) -> None:
    """Tests that gradients from before `wrap` are part of the first step."""
    network = Chain().to(context.device)
    for p in network.parameters():
        p.grad = torch.full_like(p, 1.0 + context.rank)
    pair = Beside(context, name, network)
    for p in pair.reference.parameters():
        p.grad = torch.full_like(p, pair.scale * sum(1.0 + rank for rank in pair.ranks))
    pair.step(chain_loss(0))


def autograd_grad_changes_nothing(context: Context, name: str) -> None:
    """`torch.autograd.grad` between finish and the optimizer accumulates nothing."""
    pair = Beside(context, name, reduce="sum")
    for step in range(2):
        pair.backward(chain_loss(step))
        pair.finish()
        loss = chain_loss(9)(pair.model.module, context.rank)
        torch.autograd.grad(loss, list(pair.model.parameters()))
        pair.compare()


@pytest.mark.parametrize(
    "body",
    [
        activation_checkpointing,
        there_before_wrap,
        autograd_grad_changes_nothing,
    ],
)
def test_gradients_in_a_step(ranks, implementation, body):
    ranks.run(2, body, implementation)
