"""What this machine has and lacks. Every question is asked on its own, so that a broken answer spoils no other."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
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

    @property
    def well(self) -> bool:
        """Whether there is nothing to do."""
        return not self.help


def examine() -> list[Finding]:
    """Everything worth knowing before a run; looks only, and never fails."""
    return [
        finding
        for topic, questions in {
            "software": _software,
            "machine": _machine,
            "data": _data,
            "optional": _optional,
            "network": _network,
        }.items()
        for finding in _asked(topic, questions)
    ]


def _asked(topic: str, questions: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from questions()
    except Exception as error:  # whatever is broken here is a finding as well
        yield Finding(topic, topic, f"cannot be examined ({type(error).__name__}: {error})", "Repair the installation.")


def _software() -> Iterator[Finding]:
    yield Finding("software", "fnrfl", __version__)
    yield Finding("software", "python", platform.python_version())
    for package in NEEDED_PACKAGES:
        version = _version(package)
        yield Finding("software", package, version or "missing", "" if version else _install(package))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", f"{platform.system()} {platform.machine()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "cores", str(usable))
    yield Finding("machine", "memory", _memory())
    yield Finding("machine", "gpu", _gpu())
    here = Path.cwd()
    free = shutil.disk_usage(here).free / GIB
    if os.access(here, os.W_OK):
        full = "Make room, or run elsewhere." if free < 0.1 else ""
        yield Finding("machine", "disk", f"{free:.1f} GiB free in {here}", full)
    else:
        yield Finding("machine", "disk", f"{here} cannot be written to", "fnrfl run -o A-FOLDER-OF-YOURS")


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE")
        whole, free = os.sysconf("SC_PHYS_PAGES") * size / GIB, os.sysconf("SC_AVPHYS_PAGES") * size / GIB
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{whole:.1f} GiB, {free:.1f} free"


def _gpu() -> str:
    """By asking torch, which takes a second to load, and may be missing or broken."""
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"
    return ", ".join(names) or "none; runs use the CPU"


def _data() -> Iterator[Finding]:
    from fnrfl.data.sources import available
    from fnrfl.data.sources.entry import cache_dir

    chosen = " (FNRFL_DATA)" if os.environ.get("FNRFL_DATA") else ""
    yield Finding("data", "folder", f"{cache_dir()}{chosen}")
    for entry in available():
        where = f"in {entry.where}" if entry.found else "not on this machine"
        yield Finding("data", entry.name, where, "" if entry.found else f"fnrfl data get {entry.name}")


def _optional() -> Iterator[Finding]:
    for package, (module, purpose) in OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        found = f"{_version(package) or 'installed'}, for {purpose}" if there else f"missing; it is for {purpose}"
        yield Finding("optional", package, found, "" if there else _install(package))


def _install(package: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def _network() -> Iterator[Finding]:
    """What would leave this machine, and when."""
    from fnrfl.data.sources import NAMED_DATASETS, available

    missing = [entry.name for entry in available() if not entry.found]
    for name in missing:
        asked = NAMED_DATASETS[name].downloaded_from
        yield Finding("network", name, f"a run with it, or `fnrfl data get {name}`, asks {asked}")
    if not missing:
        yield Finding("network", "data", "all data is here; no command fetches any")
    for what, becomes in OUTBOUND:
        yield Finding("network", what, becomes)
