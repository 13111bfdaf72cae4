"""Which elements of a bucket each rank sums."""

import pytest

from ddp.copy_engine.exchange import chunk_of


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000, 12_345])
def test_chunks_cover_the_bucket_once(world_size, numel):
    bounds = [chunk_of(rank, numel, world_size) for rank in range(world_size)]
    assert [i for low, high in bounds for i in range(low, high)] == list(range(numel))
    assert max(high - low for low, high in bounds) <= -(-numel // world_size) + 127
