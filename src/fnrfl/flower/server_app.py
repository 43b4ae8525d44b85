"""The ServerApp: a recipe over the nodes of a federation.

    from fnrfl.flower.server_app import server_app

    app = server_app(__file__)

The recipe is `recipe.toml` in the app's folder. The run's folder is on the server, as `fnrfl run` would write it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fnrfl.config import load
from fnrfl.core.errors import ConfigError
from fnrfl.federation.handshake import handshake
from fnrfl.flower.grid_network import GridNetwork
from fnrfl.flower.progress import Progress
from fnrfl.rundir import files
from fnrfl.runs import run as runs
from fnrfl.runs.result import Result
from fnrfl.runs.run import verify

CARRIED = "flower.json"  # in the run's folder: what Flower has carried


def server_app(file: str) -> ServerApp:
    """Return an app that runs `recipe.toml` of the app whose package has this file."""
    app, folder = ServerApp(), Path(file).resolve().parent.parent

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = {key: str(context.run_config.get(key, "")) for key in ("overrides", "out", "resume", "test")}
        progress, nodes = Progress("meeting the nodes"), int(context.run_config.get("nodes", 0))
        try:
            progress.end(run_over(grid, folder / "recipe.toml", settings, nodes, progress))  # or it was finished before
        except BaseException as error:
            progress.stop(error)
            raise

    return app


def run_over(grid: Grid, recipe: Path, settings: Mapping[str, str], nodes: int, progress: Progress) -> Result:
    """Run a recipe over the nodes of a Grid, or go on with a run; `settings` are those of the app.

    As many `nodes` are waited for; 0: as many as the recipe has clients.
    """
    network, resume = GridNetwork(grid, owing=progress.waits_for), settings["resume"]
    words = [*shlex.split(settings["overrides"]), "engine.name=flower"]
    config = verify(Path(resume), trust=False).config if resume else load(recipe, words)
    if not (count := nodes or config.clients):
        raise ConfigError("The recipe has clients = 0, so it is not known how many nodes there are. Set nodes.")
    network.labels = network.wait_for(count)
    agreed = handshake(config, network, network.labels, settings["test"])
    for line in agreed.agreement.shares:
        print(line, flush=True)
    progress.names = agreed.agreement.sites
    told: dict[str, Any] = {"callbacks": [progress], "phase": lambda name: progress.tell(phase=name)}
    told |= {"network": agreed.network, "parts": agreed.parts}
    result = runs.resume(resume, **told) if resume else runs.run(config, out=settings["out"] or True, **told)
    letters, whole = (network.carried[f"{what}_down"] + network.carried[f"{what}_up"] for what in ("letters", "flower"))
    carried = {**network.carried, "overhead_percent": round(100 * (whole - letters) / max(letters, 1), 3)}
    print(result, f"Flower has carried {json.dumps(carried)}", sep="\n", flush=True)
    if result.run_dir is not None:
        files.write(result.run_dir / CARRIED, json.dumps(carried) + "\n")
    return result
