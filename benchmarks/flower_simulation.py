"""Seconds of a round for an empty task in Flower's own simulation, with Flower's own FedAvg.

    python benchmarks/flower_simulation.py [--nodes 10] [--rounds 7] [--parameters 10000 1000000 11000000]

Clients send back the model that they were sent, and the server averages. The first round, in which Ray starts, does not
count. Needs fnrfl[flower,ray].
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def seconds(nodes: int, rounds: int, parameters: int) -> list[float]:
    """Of every round but the first."""
    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends = ClientApp(), ServerApp(), list[float]()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        told = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 2})})
        return Message(told, reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            got = super().aggregate_train(server_round, replies)
            ends.append(time.perf_counter())
            return got

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        model = ArrayRecord([np.full(parameters, 0.5, dtype=np.float32)])
        strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        strategy.start(grid=grid, initial_arrays=model, num_rounds=rounds + 1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, nodes, backend_config=resources)
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]


if __name__ == "__main__":
    os.environ.update(QUIET)
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10_000, 1_000_000, 11_000_000])
    asked = parser.parse_args()
    for size in asked.parameters:
        took = seconds(asked.nodes, asked.rounds, size)
        print(f"{size:,} parameters: {statistics.median(took):.3f} s ({min(took):.3f} to {max(took):.3f})", flush=True)
