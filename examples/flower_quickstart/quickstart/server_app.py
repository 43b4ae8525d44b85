"""What the server does: start from a model that has seen public examples, and average what clients train."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and test after each."""
    torch.manual_seed(0)
    model = task.Net()
    task.train(model, task.public_loader(), epochs=1, lr=float(context.run_config["lr"]))
    strategy = FedAvg(fraction_evaluate=float(context.run_config["fraction-evaluate"]))
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-rounds"]),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test on examples that nobody trains on."""
    model = task.Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    accuracy = task.test(model, task.test_loader())
    print(f"round {server_round}: accuracy {accuracy:.4f}", flush=True)
    return MetricRecord({"accuracy": accuracy})
