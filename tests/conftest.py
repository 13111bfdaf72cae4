"""Fixtures shared by all rooms."""

import os

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import pytest
import torch

from tests.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--implementation",
        action="append",
        metavar="FILE.py:CLASS",
        help="run the behaviour tests of tests/ddp on this variant instead of the built-in ones",
    )


@pytest.fixture(scope="session")
def cpu_ranks():
    """Four gloo ranks for the whole session."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_ranks():
    """One NCCL rank a GPU, at most four."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = RankPool(min(4, torch.cuda.device_count()), "cuda")
    yield pool
    pool.close()
