"""The processes that `TF_CONFIG` tells of, joined through JAX's own runtime."""

import json
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.devices import start
from meshwright.tf.errors import InvalidArgumentError

import jax


def join_cluster(text: str | None) -> None:
    """Meets the other workers, unless a launcher has seen to it.

    Arguments:
        text: What `TF_CONFIG` says; None or empty for one worker.
    """
    if not text or process_count() > 1:
        return
    workers, index = read_cluster(text)
    if len(workers) < 2:
        return
    if start.has_started():
        raise RuntimeError(
            "Collective ops must be configured at program startup. The runtime was "
            f"started by {start.start_place()}: make MultiWorkerMirroredStrategy first."
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        workers[0],
        num_processes=len(workers),
        process_id=index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=workers[0],
    )


def read_cluster(text: str) -> tuple[list[str], int]:
    """The addresses of the workers, and which of them this is.

    >>> read_cluster('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 1}}')
    (['a:1', 'b:1'], 1)
    """
    try:
        found: dict[str, Any] = json.loads(text)
        cluster = found.get("cluster", {})
        task = found.get("task", {})
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        index = int(task.get("index", 0))
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            None,
            None,
            f"TF_CONFIG is {text!r} ({error}). It is JSON with the workers' addresses "
            'and this one\'s number. Write, for example, {"cluster": {"worker": '
            '["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", '
            '"index": 0}}.',
        ) from error
    if task.get("type") == "worker" and "chief" in cluster:
        index += len(cluster["chief"])
    if not 0 <= index < max(len(workers), 1):
        raise ValueError(
            f"The task_id {index} exceeds the maximum id of worker. TF_CONFIG names "
            f"{len(workers)} workers, from 0."
        )
    return workers, index
