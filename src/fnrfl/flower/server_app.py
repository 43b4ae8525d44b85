"""The ServerApp: a recipe over the nodes of a federation.

    from fnrfl.flower.server_app import server_app

    app = server_app(__file__)

The recipe is `recipe.toml` in the app's folder. The run's folder is on the server, as `fnrfl run` would write it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl.flower.short_waits import shorten_waits
from fnrfl.rundir import files

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from fnrfl.config import RunConfig
    from fnrfl.flower.grid_network import GridNetwork
    from fnrfl.flower.meeting import AgreedNetwork
    from fnrfl.rundir.events import Event
    from fnrfl.runs.result import Result

CARRIED = "flower.json"  # in the run's folder: what Flower has carried


def server_app(file: str) -> ServerApp:
    """An app that runs `recipe.toml` of the app whose package has this file."""
    from flwr.serverapp import ServerApp

    app, folder = ServerApp(), Path(file).resolve().parent.parent
    shorten_waits()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told = {key: str(context.run_config.get(key, "")) for key in ("overrides", "out", "resume")}
        run_over(grid, folder / "recipe.toml", **told)

    return app


def run_over(grid: Grid, recipe: Path, *, overrides: str = "", out: str = "", resume: str = "") -> Result:
    """Run a recipe over the nodes of a Grid, or go on with a run."""
    from fnrfl.config import load
    from fnrfl.flower.grid_network import GridNetwork
    from fnrfl.runs import run as runs
    from fnrfl.runs.run_files import verify

    network = GridNetwork(grid)
    if resume:
        network_of_run = _agreed(network, verify(Path(resume), trust=False).config)
        result = runs.resume(resume, progress=_say, network=network_of_run)
    else:
        config = load(recipe, [*shlex.split(overrides), "engine.name=flower"])
        result = runs.run(config, out=out or True, progress=_say, network=_agreed(network, config))
    print(result, flush=True)
    carried = network.carried
    told = asdict(carried) | {"overhead_percent": round(carried.overhead, 3)}
    print(f"Flower has carried {json.dumps(told)}", flush=True)
    if result.run_dir is not None:
        files.write(result.run_dir / CARRIED, json.dumps(told) + "\n")
    return result


def _agreed(network: GridNetwork, config: RunConfig) -> AgreedNetwork:
    """Meet the nodes, and agree with them on the data of an experiment, which the server has as well."""
    from fnrfl.flower.meeting import AgreedNetwork, hear_facts
    from fnrfl.runs.build_engine import ask_for_scaling
    from fnrfl.runs.node_data import agree_as_server, recipe_for_nodes
    from fnrfl.runs.parts import gather_parts

    parts = gather_parts(config)
    recipe, clients = recipe_for_nodes(config), parts.config.clients
    network.labels = [str(client) for client in range(clients)]
    agreement = agree_as_server(parts, hear_facts(network, clients, recipe))
    if parts.config.dataset.asks_for_means:
        scaling = ask_for_scaling(parts.config, parts.net, parts.pool, parts.dataset.columns)
        agreement = replace(agreement, scaling=scaling)
    return AgreedNetwork(network, recipe, agreement, clients)


def _say(event: Event) -> None:
    print(f"round {event['round']}  accuracy {event['accuracy']:.4f}", flush=True)
