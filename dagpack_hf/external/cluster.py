"""Ray, which is optional: started, asked for cores and memory, and given tasks to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from dagpack_hf.external.memory import memory_limit


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Args:
        ray: the package.
        nodes: what each node has, such as `CPU`, and `memory` in bytes.
        progress: whether to show progress bars.
    """

    ray: Any
    nodes: Sequence[Mapping[str, float]]
    progress: bool

    @classmethod
    def connect(cls, progress: bool) -> Cluster:
        """The cluster that is in use; else the one that `RAY_ADDRESS` names, or a new one on this machine.

        Raises:
            ImportError: Ray is not installed.
        """
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ImportError(
                'Packing on a cluster needs Ray: pip install "dagpack-hf[ray]". On one machine, pack_dataset packs '
                "what is larger than memory without it."
            ) from error
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init()
        return cls(ray, [node["Resources"] for node in ray.nodes() if node["Alive"]], progress)

    @property
    def cores(self) -> int:
        """Cores of all nodes."""
        return max(int(sum(node.get("CPU", 0) for node in self.nodes)), 1)

    @property
    def memory_of_core(self) -> int:
        """Bytes of memory for each core, on the node that has least."""
        shares = [node["memory"] / node["CPU"] for node in self.nodes if node.get("CPU") and "memory" in node]
        return int(min(shares, default=memory_limit(None)))

    def task(self, function: Callable[..., Any], memory: int = 0, **options: Any) -> Any:
        """A function as a task, for which so many bytes are set aside, or as many as the largest node has."""
        largest = max((node.get("memory", 0) for node in self.nodes), default=0)
        return self.ray.remote(function).options(memory=min(memory, int(largest)), **options)

    def get(self, reference: Any) -> Any:
        """What a task returned.

        Raises:
            ValueError: as the task raised it, if it did.
        """
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from error
            raise

    def results(
        self, stage: str, tasks: Sequence[Any], reference: Callable[[Any], Any] = lambda task: task
    ) -> Iterator[Any]:
        """What tasks that run returned, in order.

        If one fails, the others are left to run: to cancel a task at the moment it ends can abort the driver.

        Args:
            stage: shown beside the bar.
            tasks: references, or generators of references.
            reference: which one of a task is meant.
        """
        for task in tqdm(tasks, desc=f"Packing: {stage}", disable=not self.progress, leave=False):
            yield self.get(reference(task))
