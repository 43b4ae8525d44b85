"""A ready Flower app from a recipe: what `fnrfl deploy init` writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fnrfl import __version__
from fnrfl.config import RunConfig, load
from fnrfl.core.errors import ConfigError
from fnrfl.data import scenarios
from fnrfl.data.scenarios import Natural
from fnrfl.data.sources import NAMED_DATASETS
from fnrfl.federation.handshake import refuse_what_sites_cannot
from fnrfl.flower.deployment import NODE_FILE, Deployment, NodeSettings
from fnrfl.runs.setup.method import method_title

RECIPE_FILE = "recipe.toml"

PROJECT_TEXT = """[project]
name = "{name}"
version = "1.0.0"
description = "fnrfl: {method} on {nodes} nodes"
license = "Apache-2.0"
dependencies = ["fnrfl[flower]"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "fnrfl"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# What `flwr run . --run-config 'overrides="rounds=3"'` may change. Nodes do not read it.
[tool.flwr.app.config]
overrides = ""  # keys of the recipe, as `fnrfl run` takes them: "algorithm=scaffold fnr=on"
out = ""  # the run's folder; empty: runs/, below the folder in which the SuperLink was started
resume = ""  # the folder of a run that goes on
test = ""  # the server's test set, where nodes bring data of their own
nodes = {waits}  # how many are waited for; 0: as many as the recipe has clients
"""

SERVER_TEXT = '''"""The server: the recipe, over the nodes of the federation."""

from fnrfl.flower.server_app import server_app

app = server_app(__file__)
'''

CLIENT_TEXT = '''"""The node: it answers with its own data, which its own configuration names."""

from fnrfl.flower.client_app import client_app

app = client_app()
'''

README_TEXT = """# {name}

A Flower app that runs the recipe `{recipe}` ({method}, {nodes} clients) over a network, written by fnrfl {version}.

- `fnrfl deploy run ..` signs it and runs it on the deployment in the folder above.
- `flwr run . deployment --stream`, with FLWR_HOME set to `../flower`, runs it with Flower's own command. It sends
  the app without a signature: nodes that accept signed apps alone (`--trusted-entities`) refuse it.
- Each node has a folder of its own with a `{file}`: which client it is, and where its data is.
"""

NODE_TEXT = """# What this node says about itself. No message from the server can change or add anything here.
{label}
data = {data}
"""


def _whole_path(name: str) -> str:
    """Make a path of data absolute, since the SuperLink and the nodes work in other folders."""
    is_path = name not in (*NAMED_DATASETS, "train", "test") and Path(name).exists()
    return str(Path(name).resolve()) if is_path else name


def check_before_run(
    deployment: Deployment, overrides: Sequence[str], resume: Path | None, test: Path | None, *, trust: bool = False
) -> None:
    """Refuse what nodes could not run, before a message is sent."""
    begun, words = deployment.app / RECIPE_FILE, [*overrides, "engine=flower"]
    config = load(begun, words, trust=trust) if resume is None else load(resume / "config.toml", trust=trust)
    if test is not None and not test.exists():
        raise ConfigError(f"--test {test} is no such file or folder. Name the server's test set.")
    settings = [values for node in deployment.nodes if (values := NodeSettings(node, {}).in_file())]
    if settings and not any("partition" in values for values in settings):
        refuse_what_sites_cannot(config, str(test or ""))


def write_app(folder: Path, config: RunConfig, nodes: int = 0) -> Deployment:
    """Write a folder with the app, and a folder for each node; refuse a folder that has something in it.

    A node takes a part of the recipe's data set, or, if the scenario is natural, brings data of its own.
    """
    deployment = Deployment(folder.resolve())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not empty. Give the name of a new folder.")
    if own_data := isinstance(scenarios.parse(config.scenario).split, Natural):
        refuse_what_sites_cannot(config)
    nodes = nodes or config.clients
    if not nodes:
        raise ConfigError("The recipe has clients = 0: those that the data names. Say how many nodes there will be.")
    dataset = replace(config.dataset, name=_whole_path(config.dataset.name))
    config = replace(config, dataset=dataset, public=replace(config.public, source=_whole_path(config.public.source)))
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-") or "app"
    package = "app_" + name.replace("-", "_")
    words = {"name": f"fnrfl-{name}", "package": package, "method": method_title(config), "nodes": nodes}
    more = {"recipe": RECIPE_FILE, "version": __version__, "file": NODE_FILE}
    texts = {
        "app/pyproject.toml": PROJECT_TEXT.format(**words, waits=0 if config.clients else nodes),
        f"app/{RECIPE_FILE}": config.to_toml(),
        "app/README.md": README_TEXT.format(**words, **more),
        f"app/{package}/__init__.py": f'"""The app fnrfl-{name}."""\n',
        f"app/{package}/server_app.py": SERVER_TEXT,
        f"app/{package}/client_app.py": CLIENT_TEXT,
        ".gitignore": "*\n",
    }
    for client in range(nodes):
        label = f'name = "site {client}"' if own_data else f"partition = {client}"
        data = json.dumps("" if own_data else config.dataset.name, ensure_ascii=False)
        texts[f"nodes/{client}/{NODE_FILE}"] = NODE_TEXT.format(label=label, data=data)
    for relative, text in texts.items():
        path = deployment.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in (deployment.root, *deployment.nodes):
        os.chmod(path, 0o700)  # keys, logs and clients' memory will be there
    return deployment
