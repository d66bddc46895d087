"""A Ray cluster of two machines in one: a head without cores, and two nodes with a core each.

Prints its address, and then obeys the lines of its stdin: `kill` ends the second node, at once and
with all its processes; `add` brings another.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Run until stdin ends."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    node = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "kill\n":
            cluster.remove_node(node, allow_graceful=False)
        elif line == "add\n":
            node = cluster.add_node(num_cpus=1)
        print(line.strip(), flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
