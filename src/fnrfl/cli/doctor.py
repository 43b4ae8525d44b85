"""What this machine has and lacks. Every question is asked on its own, so that a broken answer spoils no other."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fnrfl import __version__

NEEDED_PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "typer", "rich")
OPTIONAL = {  # package: (what Python calls it, what it is for)
    "matplotlib": ("matplotlib", "figures"),
    "jinja2": ("jinja2", "the report page"),
    "pillow": ("PIL", "folders of images, and one way to get cifar10"),
    "pandas": ("pandas", "tables"),
    "tensorboard": ("tensorboard", "--log tensorboard"),
    "mlflow": ("mlflow", "--log mlflow"),
    "wandb": ("wandb", "--log wandb, offline"),
    "flwr": ("flwr", "fnrfl deploy: clients on other machines"),
    "ray": ("ray", "--engine ray and compare --on ray"),
}
# Connections that packages of an extra would make to the outside: what it is, where it goes, and what becomes of it.
OUTBOUND = (
    ("flower: telemetry", "telemetry.flower.ai; off: `fnrfl deploy` sets FLWR_TELEMETRY_ENABLED=0. If you type flwr or "
        "flower-supernode yourself, even with --help, set it yourself."),
    ("flower: update check", "api.flower.ai; off: `fnrfl deploy` sets FLWR_DISABLE_UPDATE_CHECK=1. With flwr itself, "
        "set it yourself."),
    ("flower: installing an app's packages", "the package index, in a SuperLink started without a flag; off: `fnrfl "
        "deploy` sets FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"),
    ("flower: apps from the hub", "api.flower.ai, for a name such as @someone/app; off: `fnrfl deploy` sets "
        "FLWR_SUPERGRID_API_URL to an address where nobody listens"),
    ("flower: flwr login, flwr new, flwr app, flwr chat", "api.flower.ai; cannot be switched off by fnrfl, which does "
        "not use these commands"),
    ("flower: the federation itself", "from each SuperNode to the SuperLink; cannot be switched off: it is its purpose;"
        " on loopback with `fnrfl deploy up`"),
    ("ray: usage reports", "usage-stats.ray.io; off: fnrfl sets RAY_USAGE_STATS_ENABLED=0"),
    ("ray: which cloud this is", "169.254.169.254, metadata.google.internal, by the process of Ray's dashboard; cannot "
        "be switched off: Ray always starts that process. It says nothing about you."),
    ("mlflow: telemetry", "config.mlflow-telemetry.io; off: fnrfl sets MLFLOW_DISABLE_TELEMETRY, DO_NOT_TRACK"),
    ("wandb: runs, machine facts, errors", "api.wandb.ai, sentry.io; off: fnrfl logs offline, without reports. `wandb "
        "sync` sends a run, if you type it."),
    ("tensorboard: nothing", "no connection, its pages are read from this machine"),
)  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line: a fact, and where something is missing the command that helps."""

    topic: str
    name: str
    found: str
    help: str = ""


def examine() -> list[Finding]:
    """Everything worth knowing before a run; looks only, and never fails."""
    found: list[Finding] = []
    for questions in (_software, _machine, _data, _optional, _network):
        topic = questions.__name__[1:]
        try:
            found += (Finding(topic, *answer) for answer in questions())
        except Exception as error:  # whatever is broken here is a finding as well
            broken = f"cannot be examined ({type(error).__name__}: {error})"
            found.append(Finding(topic, topic, broken, "Repair the installation."))
    return found


Answers = Iterator[tuple[str, str] | tuple[str, str, str]]  # name, found, and perhaps help


def _software() -> Answers:
    yield "fnrfl", __version__
    yield "python", platform.python_version()
    for package in NEEDED_PACKAGES:
        version = _version(package)
        yield package, version or "missing", "" if version else _install(package)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Answers:
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    try:
        size = os.sysconf("SC_PAGE_SIZE") / GIB
        yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * size:.1f} GiB, {os.sysconf('SC_AVPHYS_PAGES') * size:.1f} free"
    except (AttributeError, ValueError, OSError):
        yield "memory", "unknown"
    try:  # torch takes a second to load, and may be missing or broken
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield "gpu", ", ".join(names) or "none; runs use the CPU"
    except Exception as error:
        yield "gpu", f"unknown ({type(error).__name__}: {error})"
    here = Path.cwd()
    free = shutil.disk_usage(here).free / GIB
    if os.access(here, os.W_OK):
        yield "disk", f"{free:.1f} GiB free in {here}", "Make room, or run elsewhere." if free < 0.1 else ""
    else:
        yield "disk", f"{here} cannot be written to", "fnrfl run -o A-FOLDER-OF-YOURS"


def _data() -> Answers:
    from fnrfl.data.sources import available
    from fnrfl.data.sources.entry import cache_dir

    yield "folder", f"{cache_dir()}{' (FNRFL_DATA)' if os.environ.get('FNRFL_DATA') else ''}"
    for entry in available():
        where = f"in {entry.where}" if entry.found else "not on this machine"
        yield entry.name, where, "" if entry.found else f"fnrfl data get {entry.name}"


def _optional() -> Answers:
    for package, (module, purpose) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield package, f"missing; it is for {purpose}", _install(package)
        else:
            yield package, f"{_version(package) or 'installed'}, for {purpose}"


def _install(package: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def _network() -> Answers:
    """What would leave this machine, and when."""
    from fnrfl.data.sources import NAMED_DATASETS, available

    missing = [entry.name for entry in available() if not entry.found]
    for name in missing:
        yield name, f"a run with it, or `fnrfl data get {name}`, asks {NAMED_DATASETS[name].downloaded_from}"
    if not missing:
        yield "data", "all data is here; no command fetches any"
    yield from OUTBOUND
