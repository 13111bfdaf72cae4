"""The variants that exchange used rows of embeddings, with that option on: a plug-in for tests."""

from torch import nn

from ddp.bucketed import BucketedDDP
from ddp.copy_engine import CopyEngineDDP
from ddp.individual_v2 import IndividualV2DDP
from tests.support.cpu_copy_engine import CpuCopyEngineDDP


class SparseIndividualV2(IndividualV2DDP):
    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **{"sparse_embeddings": True, **options})


class SparseBucketed(BucketedDDP):
    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **{"sparse_embeddings": True, **options})


class SparseCopyEngine(CopyEngineDDP):
    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **{"sparse_embeddings": True, **options})


class SparseCpuCopyEngine(CpuCopyEngineDDP):
    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **{"sparse_embeddings": True, **options})
