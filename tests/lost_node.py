"""Encodes shards on two local Ray nodes and kills one of them in the middle; see test_encode."""

import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from sscd_vec.encoding import EncodeShard, plan, run_on_ray
from tests.tiny_encoder import TinyEncoder


class SlowEncoder(TinyEncoder):
    """Slow enough to be killed at work."""

    def encode(self, inputs: Any, **options: Any) -> Any:  # noqa: ANN401
        time.sleep(0.5)
        return super().encode(inputs, **options)


def main(shards: Path, to: Path, finished_names: Path) -> None:
    """Note the names of the files in the order they are finished."""
    small: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster: Any = Cluster(True, head_node_args={**small, "include_dashboard": False})
    node = cluster.add_node(**small)
    engine: Any = ray
    engine.init(address=cluster.address, log_to_driver=False)
    finished = run_on_ray(EncodeShard(to, SlowEncoder()), plan([shards]), "auto", workers=4)
    names = []
    for done in finished:
        names.append(done.name)
        if len(names) == 3:
            cluster.remove_node(node, allow_graceful=False)
    finished_names.write_text("\n".join(names))
    engine.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
