"""What a client does: train the model that it is sent on its own examples, and test one."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's examples."""
    model = task.Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = task.load_data(_number("partition-id", context), _number("num-partitions", context))
    loss = task.train(model, loader, int(context.run_config["epochs"]), float(context.run_config["lr"]))
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test on this client's examples."""
    model = task.Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = task.load_data(_number("partition-id", context), _number("num-partitions", context))
    metrics = MetricRecord({"accuracy": task.test(model, loader), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _number(name: str, context: Context) -> int:
    return int(context.node_config[name])
