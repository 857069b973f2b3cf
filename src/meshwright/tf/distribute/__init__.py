"""`tf.distribute`: strategies under TensorFlow's names, made of Meshwright's."""

from types import SimpleNamespace

from meshwright.tf.absent import refuse
from meshwright.tf.distribute.inputs import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
)
from meshwright.tf.distribute.named import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
)
from meshwright.tf.distribute.replica_context import (
    ReduceOp,
    ReplicaContext,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from meshwright.tf.distribute.strategy import Strategy, get_strategy
from meshwright.tf.distribute.values import PerReplica as DistributedValues


class CrossDeviceOps:
    """How TensorFlow reduces values; here XLA chooses.

    >>> from meshwright import tf
    >>> ops = tf.distribute.HierarchicalCopyAllReduce(num_packs=1)
    """

    def __init__(self, *_: object, **__: object) -> None:
        pass


class NcclAllReduce(CrossDeviceOps):
    """Accepted."""


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Accepted."""


class ReductionToOneDevice(CrossDeviceOps):
    """Accepted."""


experimental = SimpleNamespace(
    CentralStorageStrategy=CentralStorageStrategy,
    ParameterServerStrategy=ParameterServerStrategy,
    MultiWorkerMirroredStrategy=MultiWorkerMirroredStrategy,
    CommunicationOptions=CrossDeviceOps,
    CollectiveHints=CrossDeviceOps,
)

__getattr__ = refuse(
    "tf.distribute",
    {
        "TPUStrategy": "mw.Mirrored() on the TPUs that JAX sees",
        "coordinator": "mw.AsyncServer, whose workers take batches by themselves",
        "cluster_resolver": "meshwright train, which knows Slurm, MPI and Kubernetes",
        "experimental_set_strategy": "with strategy.scope():",
    },
)

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Strategy",
    "experimental",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
