"""What comes out of a run: its numbers, its models, and the hash of everything that was trained."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import ConfigError
from fnrfl.core.modules import InputScale
from fnrfl.core.net import Net
from fnrfl.core.store import CPU, ClientMemory, ClientStore
from fnrfl.core.types import State, Tree
from fnrfl.core.words import choices, counted, printable
from fnrfl.data.datasets import Facts
from fnrfl.data.partition.by_client import some_of
from fnrfl.process import isolated
from fnrfl.rundir import checkpoint
from fnrfl.rundir.events import Event
from fnrfl.rundir.record import Index
from fnrfl.runs.metrics import OWN, RunMetrics
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.quality import NUMBER_METRICS, leading_metric
from fnrfl.runs.setup.method import build_algorithm
from fnrfl.runs.setup.model import build_net

# The server's state, and what a client remembers: None for one that never wrote anything.
StoredModels = tuple[State, Callable[[int], Tree | None]]
ReadModels = Callable[[], StoredModels]


@dataclass(frozen=True, eq=False)
class ClientModels:
    """Every client's model, of what the server knows and the client remembers; one at a time is in memory."""

    algorithm: Algorithm
    net: Net
    names: tuple[str, ...]  # what each client is called: its id in the data, or its number
    stored: ReadModels

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[State]:
        return (self[client] for client in range(len(self)))

    def number(self, client: int | str) -> int:
        """Return the number of the client of this name."""
        if str(client) in self.names:
            return self.names.index(str(client))
        known = f"{len(self)}, called {some_of(self.names)}"
        raise ConfigError(f"There is no client {printable(str(client))}: the run has {known}. Give one of them.")

    def __getitem__(self, client: int) -> State:
        state, memory = self._stored
        found = memory(client)
        mine = self.algorithm.personal(self.net, state, client, self._birth if found is None else found)
        return State(mine.params, mine.buffers)

    def model(self, client: int | str) -> nn.Module:
        """One client's model as an ordinary module in eval mode; the client is called as in `names`."""
        mine = self[self.number(client)]
        return self.net.export(mine.params, mine.buffers)

    @cached_property
    def _stored(self) -> StoredModels:
        return self.stored()

    @cached_property
    def _birth(self) -> Tree:
        return self.algorithm.client_state(self.net)


@dataclass(frozen=True, repr=False)
class Result(RunMetrics):
    """What came out of a run: the numbers of every round, and the model."""

    config: RunConfig
    rounds: list[Event]
    weights: Tree  # trained parameters and buffers, by the module's own names
    data: Facts  # about what it was trained on
    run_dir: Path | None
    stored: ReadModels | None = None  # of the clients' models, for methods that give each client its own
    passed: PassedObjects = NOTHING_PASSED  # what was passed in as objects

    def __repr__(self) -> str:
        where = "" if self.run_dir is None else f", kept in {self.run_dir}"
        leak = "leak, " if self.config.leaks_on else ""
        return f"Result({leak}{self._what}: {self.headline}{where})"

    @property
    def headline(self) -> str:
        """What came out, by the metric that the method leads with."""
        name = leading_metric([self.stored is not None]).name
        value = self.last(name)
        return f"{name} {'-' if value is None else f'{value:.4f}'} after {counted(len(self.rounds), 'round')}"

    def _repr_html_(self) -> str:
        """Show in a notebook what was run, and the numbers of the last round."""
        last = {name: values[-1] for name, values in self.curve().items()}
        shown = {name: "-" if one is None else f"{one:.4g}" if one % 1 else f"{one:,.0f}" for name, one in last.items()}
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{one}</td></tr>" for name, one in shown.items())
        return f"<p>{escape(repr(self))}</p><table>{cells}</table>"

    @property
    def _what(self) -> str:
        config = self.config
        return f"{config.algorithm.label}{'' if config.fnr is None else ' + FNR'} on {config.dataset.name}"

    def plot(self, metric: str = "accuracy", ax: Any = None) -> Any:
        """Draw a curve of `curve()` over the rounds with matplotlib; return its axes."""
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ConfigError("A plot needs the package matplotlib. Install it, or use curve().") from error
        curve = self.curve()
        if metric not in curve:
            raise ConfigError(f'There is no curve "{metric}". {choices(metric, list(curve))}.')
        axes: Any = pyplot.subplots()[1] if ax is None else ax
        axes.plot(curve["round"], curve[metric], label=self._what)
        axes.set(xlabel="round", ylabel=metric)
        return axes

    @property
    def confusion(self) -> list[list[int]]:
        """Test examples by their class (rows) and by the class that the model gives (columns), after the last round."""
        if (logged := self.rounds[-1].get("confusion")) is None:
            raise ConfigError(
                "The run's log has no confusion matrix, as in older versions. fnrfl.evaluate counts anew."
            )
        return list(logged)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.data.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of an example."""
        return self.data.input_shape

    @property
    def clients(self) -> tuple[str, ...]:
        """What each client is called: its id in the data, or its number."""
        return self.data.clients or tuple(str(client) for client in range(self.config.clients))

    @property
    def per_site(self) -> dict[str, float | None] | None:
        """Each client's accuracy on the test examples that it brought, after the last round; None if nobody did."""
        scores = self.rounds[-1].get("per_site")
        return None if scores is None else dict(zip(self.clients, scores, strict=True))

    @property
    def per_site_interval(self) -> dict[str, tuple[float, float] | None] | None:
        """The 95 % interval of each number of `per_site`, by bootstrap; None where there are none."""
        found = self.rounds[-1].get("per_site_interval")
        return found and {name: ends and tuple(ends) for name, ends in zip(self.clients, found, strict=True)}

    @cached_property
    @isolated()
    def net(self) -> Net:
        """The net that the run trained, freshly initialised; its data need not be there."""
        keys: dict[str, Any] = {"integers": self.data.tokens, "passed": self.passed, "trained": True}
        net = build_net(self.config, self.input_shape, len(self.classes), **keys)
        return net.with_input_scale(InputScale.of(self.weights)) if self.config.dataset.asks_for_means else net

    @cached_property
    @isolated()
    def model(self) -> nn.Module:
        """The server's model, an ordinary module in eval mode."""
        return self.net.export(*self.net.pack(self.weights))

    @cached_property
    def client_models(self) -> ClientModels | None:
        """The clients' models where the method gives each its own, else None: all use `model`."""
        if self.stored is None:
            return None
        return ClientModels(build_algorithm(self.config, self.passed), self.net, self.clients, self.stored)

    def client_model(self, client: int | str) -> nn.Module:
        """Return a client's model, an ordinary module in eval mode, for methods that give each its own.

        A client is called by its id where the data names the clients (`clients`), and else by its number.
        """
        if self.client_models is None:
            raise ConfigError(
                f"{self.config.algorithm.name} trains one model for all clients, so client {client} has none of its "
                "own. Use `model`."
            )
        return self.client_models.model(client)

    @cached_property
    def model_sha256(self) -> str:
        """Hash of what was trained: every named parameter and buffer, and of each client's model if it has its own."""
        digest = hashlib.sha256()
        _add_tensors(digest, self.weights)
        for client, mine in enumerate(self.client_models or ()):
            digest.update(f"client {client}\n".encode())
            _add_tensors(digest, self.net.unflatten(mine.params) | mine.buffers)
        return digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """Return the run as one JSON object."""
        return {
            "algorithm": self.config.algorithm.name,
            "fnr": self.config.as_dict()["fnr"],
            "scenario": self.config.scenario,
            "protocol": self.config.protocol,
            "leaks": list(self.config.leaks_on),
            "seed": self.config.seed,
            "personalised": self.stored is not None,
            "rounds": len(self.rounds),
            **{name: self.last(name) for name in NUMBER_METRICS},
            "accuracy_last3": self.accuracy_last3,
            "accuracy_best": self.accuracy_best,
            "per_site": self.per_site,
            "per_site_interval": self.per_site_interval,
            "per_class": self.per_class,
            OWN: self.own_metrics,
            "seconds_train": self.seconds_train,
            "seconds_eval": sum(event["seconds"]["evaluate"] for event in self.rounds),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "kappa": self.kappa,
            "rho": self.rho,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "model_sha256": self.model_sha256,
        }


def _add_tensors(digest: hashlib._Hash, named: Tree) -> None:
    for name, tensor in sorted(named.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())


# -- where models of clients are kept ----------------------------------------------------------------------------------


def models_on_disk(run_dir: Path, saved: Index) -> ReadModels:
    """Keep the last checkpoint of a finished run; it is read, and compared with its hashes, when it is needed."""
    path = run_dir.absolute()  # the working folder may be another by then

    def read() -> StoredModels:
        if not (path / "rounds").exists():
            raise ConfigError(
                f"{run_dir} keeps the clients' models in its last checkpoint, and rounds/ is missing. Put it back as "
                "it was, or run again into another directory."
            )
        return checkpoint.server_state(path, saved), lambda client: checkpoint.client_memory(path, saved, client)

    return read


def models_in_memory(state: State, store: ClientMemory) -> ReadModels:
    """Keep what an engine has at the end of a run that writes nothing; memories on disk are copied, for they go."""
    state = state.to(CPU)
    if not isinstance(store, ClientStore) or store.folder is None:
        memories = {client: {k: v.cpu() for k, v in store.get(client).items()} for client in store}
        return lambda: (state, memories.get)
    folder = tempfile.TemporaryDirectory(prefix="fnrfl-")
    copies = ClientStore({}, Path(folder.name))
    for client in store:
        copies.put(client, store.get(client))
    # The folder goes when nobody can ask any more.
    return lambda: (state, lambda client, _owner=folder: copies.get(client) if client in copies else None)
