"""How operands are read, and which tile a size stands for."""

import weakref
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from dp_clipping.kernels.launch import tiles
from dp_clipping.kernels.launch.tiles import Tile, is_aligned, readable, tile_of
from tests.support.host_cost import NoDevice
from tests.support.kernel_cases import Place, lay_out, on_kernels


@on_kernels()
def test_operands(place: Place) -> None:
    """The layouts are what the bodies take them for: both ways of loading are used."""

    def is_described(x: Tensor) -> bool:
        sample, token, feature = x.stride()
        return feature == 1 and is_aligned([x.data_ptr()], [sample, token], x.element_size())

    aligned, odd = place.normal(2, 40, 40), place.normal(2, 33, 35)
    assert all(is_described(lay_out(aligned, how)) for how in ("contiguous", "time_major"))
    assert is_described(lay_out(odd, "padded"))
    for how in ("transposed", "shifted", "shared"):
        assert not is_described(lay_out(aligned, how))
    assert not is_described(odd)


def test_a_tile_of_a_size_is_square_and_as_deep_as_its_widest_operand_allows():
    assert tile_of(None, torch.float32) is None
    assert tile_of(64, torch.bfloat16) == Tile(64, 64, 64, 4, 3)
    assert tile_of(64, torch.bfloat16, torch.float32) == Tile(64, 64, 32, 4, 3)
    assert tile_of(16, torch.float32).depth == 16


def test_only_strides_that_the_kernels_cannot_read_are_copied():
    x = torch.randn(2, 3, 4)
    assert readable(x) is x
    turned = x.mT
    assert readable(turned).is_contiguous()
    assert torch.equal(readable(turned), turned)
    nothing = x[:0].mT
    assert readable(nothing) is nothing


def test_what_a_graph_reads_is_held():
    made = []

    @tiles.kept_on_device(maxsize=1)
    def ones(size):
        made.append(size)
        return torch.ones(size)

    holder = []
    first = ones(2)
    with tiles.holding(holder):
        assert ones(2) is first
        ones(3)
    assert ones(2) is not first
    assert made == [2, 3, 2]
    assert len(holder) == 2
    assert holder[0] is first


def test_batches_of_ever_new_lengths_keep_few_tensors():
    device = torch.device("cpu")
    kept = tiles.on_device((1, 2), torch.int32, device)
    assert kept is tiles.on_device((1, 2), torch.int32, device)
    made = [weakref.ref(tiles.on_device((n,), torch.int64, device)) for n in range(1000)]
    assert sum(one() is not None for one in made) <= 256


class Kernel:
    """Stands in for a kernel: notes which of its launches went through Triton."""

    arg_names = ("p_x", "p_y", "n", "DTYPE", "BLOCK")

    def __init__(self):
        self.by_triton, self.direct = [], []
        self.run, self.function, self.packed_metadata = self._run, 7, ()

    def _run(self, *arguments):
        self.direct.append(arguments)

    def __getitem__(self, grid):
        def launched(*arguments, **constants):
            self.by_triton.append((grid, arguments, constants))
            return self

        return launched


def test_a_launch_of_a_known_kind_is_that_of_triton():
    kernel = Kernel()
    x, y = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)

    def run(x=x, y=y, n=8, block=16):
        tiles.launch(kernel, (2, 3), (x, y), (n,), DTYPE=x.dtype, BLOCK=block, num_warps=4)

    checked = patch.object(tiles, "IS_CHECKED", True)  # whichever Triton is here
    with checked, patch.object(driver, "_active", NoDevice()), patch.dict(tiles._known, clear=True):
        run()
        run()
        own = (2, 3, 1, 0, 7, (), None, None, None, x, y, 8, tl.float32, 16)
        assert kernel.direct == [own]
        run(x=x[4:])  # aligned, and the same kind; each of the next is another one
        assert len(kernel.direct) == 2
        for other in ({"x": x[1:]}, {"x": y}, {"y": None}, {"n": 9}, {"block": 32}):
            run(**other)
            run(**other)
        assert len(kernel.direct) == 7
        assert len(kernel.by_triton) == 6
        assert kernel.by_triton[0] == (
            (2, 3), (x, y, 8), {"DTYPE": tl.float32, "BLOCK": 16, "num_warps": 4},
        )  # fmt: skip
