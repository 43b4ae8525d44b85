"""Loggers: callbacks that write a run for TensorBoard, MLflow or Weights & Biases, on this machine alone.

Each logs the config, every number of every round under the round's number, leaks as a tag and the model's hash. The
packages are optional and imported when a run begins. What they would send home is turned off.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.rundir import files
from fnrfl.rundir.directory import TENSORBOARD
from fnrfl.rundir.events import Event
from fnrfl.runs.callbacks import Callback

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.runs.result import Result

NOT_LOGGED = ("round", "rounds")  # the number of a round is the step
LONGEST_PARAM = 6000  # characters of a value, for MLflow


def scalars(event: Event) -> dict[str, float]:
    """Every number of a round by name, those in sections as section/name; lists, texts and switches are left out.

    >>> scalars({"round": 3, "accuracy": 0.5, "bytes": {"local": {"up": 8}}, "per_class": [0.1], "loss": None})
    {'accuracy': 0.5, 'bytes/local/up': 8}
    """
    return {name: value for name, value in _numbers(event, "") if name not in NOT_LOGGED}


def _numbers(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{name}", value


def named_loggers(names: Iterable[str]) -> list[Callback]:
    """The loggers with these names, each once, as `--log` takes them."""
    found: dict[str, Callback] = {}
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f'--log "{name}" is not known. {choices(name, LOGGERS)}.')
        found.setdefault(name, LOGGERS[name]())
    return list(found.values())


def _refuse_missing(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"Logging to {package} needs a package that is not there. Run `pip install {package}`.")


def _run_name(config: RunConfig, facts: Mapping[str, Any]) -> str:
    """The name of a run's folder; of a run without one, what the folder would be called."""
    return Path(facts["run_dir"] or config.run_dir).name


class TensorBoard(Callback):
    """Writes event files that `tensorboard --logdir runs` shows.

    By default they are in the folder `tensorboard` of the run directory; with `folder`, in a folder below it that has
    the run's name. A resumed run goes on in the same folder, and rounds that are trained again replace the old ones.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        _refuse_missing("tensorboard")
        self.folder = None if folder is None else Path(folder)
        self._file: BinaryIO | None = None

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Open a file, and write the config and the tags."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._file = self._open(config, facts)
        self._write(file_version="brain.Event:2")
        done = int(facts["rounds_done"])
        # Later steps in older files are void.
        self._write(session_log=SessionLog(status=SessionLog.START), step=done + 1)
        self._text("config", "\n".join(f"    {line}" for line in config.to_toml().splitlines()), done)
        self._text("leaks", ", ".join(config.leaks_on) or "none", done)

    def round(self, event: Event) -> None:
        """Write the numbers of a round."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(event).items()]
        self._write(summary=Summary(value=values), step=event["round"])

    def end(self, result: Result) -> None:
        """Write the hash of the model."""
        self._text("model_sha256", result.model_sha256, len(result.rounds))
        self._close()

    def stop(self, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def _open(self, config: RunConfig, facts: Mapping[str, Any]) -> BinaryIO:
        if self.folder is None and facts["folder"] is None:
            raise ConfigError("This run writes no run directory, so give TensorBoard a folder: TensorBoard('logs').")
        inside = Path(facts["folder"] or "") / TENSORBOARD
        folder = inside if self.folder is None else self.folder / _run_name(config, facts)
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is None and not files.is_folder(folder):
            raise ConfigError(f"{folder} is a link. Put the folder itself there, or remove it.")
        # TensorBoard reads files in the order of their names. A file stays open when a run directory gets its name.
        return (folder / f"events.out.tfevents.{time.time_ns() // 1000:017d}.fnrfl").open("xb")

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text.encode()])
        about = create_summary_metadata(display_name=tag, description="")
        self._write(summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=about)]), step=step)

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Written
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None, "begin comes first"
        RecordWriter(self._file).write(Written(wall_time=time.time(), **event).SerializeToString())
        self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class MLflow(Callback):
    """Logs to an MLflow store, by default the database mlflow.db in the working folder, which `mlflow ui` shows.

    `store` is another one, as MLflow writes it: sqlite:///runs.db. A resumed run goes on as the same run of MLflow, and
    rounds that it has already are not logged again.
    """

    def __init__(self, store: str | None = None, experiment: str = "fnrfl") -> None:
        _refuse_missing("mlflow")
        if store is None:  # with the whole path: MLflow remembers a store by these words
            store = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
        if store.startswith("sqlite:") and importlib.util.find_spec("alembic") is None:
            raise ConfigError("MLflow's database needs sqlalchemy and alembic. Run `pip install sqlalchemy alembic`.")
        self.store, self.experiment = store, experiment
        self._client: Any = None
        self._run = ""
        self._logged = 0  # rounds that the store has

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Begin a run in the store, or find the one that is resumed there."""
        os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")  # read when mlflow is imported
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        from fnrfl.rundir.configs import flat_config

        for noisy in ("mlflow.store.db.utils", "alembic.runtime.migration"):  # they tell of every new database
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._client = MlflowClient(self.store)
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        self._run, self._logged = self._find(experiment, facts), int(facts["rounds_done"])
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
            self._logged = max((one.step for one in self._client.get_metric_history(self._run, "accuracy")), default=0)
            return
        name = _run_name(config, facts)
        self._run = self._client.create_run(experiment, run_name=name, tags=self._tags(config, facts)).info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat_config(config).items()]
        for place in range(0, len(params), 100):  # that many at once
            self._client.log_batch(self._run, params=params[place : place + 100])

    def round(self, event: Event) -> None:
        """Log the numbers of a round, unless the store has them."""
        from mlflow.entities import Metric

        if event["round"] <= self._logged:
            return
        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII), value, now, event["round"])
            for name, value in scalars(event).items()
        ]
        for place in range(0, len(metrics), 1000):  # that many at once
            self._client.log_batch(self._run, metrics=metrics[place : place + 1000])

    def end(self, result: Result) -> None:
        """Tag the run with the hash of the model, and finish it."""
        self._client.set_tag(self._run, "model_sha256", result.model_sha256)
        self._finish("FINISHED")

    def stop(self, error: BaseException) -> None:
        """Say that the run was stopped or has failed."""
        self._finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def _finish(self, status: str) -> None:
        if self._run:
            self._client.set_terminated(self._run, status)
        self._client, self._run = None, ""

    def _find(self, experiment: str, facts: Mapping[str, Any]) -> str:
        """The run of MLflow that a resumed run was logged to; "" if there is none."""
        if not facts["resumed"]:
            return ""
        wanted = f"tags.fnrfl_run = '{_identity(facts)}'"
        found = self._client.search_runs([experiment], wanted, max_results=1, order_by=["attributes.start_time DESC"])
        return found[0].info.run_id if found else ""

    @staticmethod
    def _tags(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, str]:
        tags = {"config_sha256": config.sha256, "fnrfl_version": str(facts["versions"]["fnrfl"])}
        if facts["run_dir"] is not None:
            tags |= {"run_dir": str(facts["run_dir"]), "fnrfl_run": _identity(facts)}
        return tags | ({"leak": ", ".join(config.leaks_on)} if config.leaks_on else {})


def _identity(facts: Mapping[str, Any]) -> str:
    """What a run directory and its config are called in a store."""
    place = os.path.abspath(facts["run_dir"])
    return hashlib.sha256(f"{place}\n{facts['config_sha256']}".encode(errors="surrogateescape")).hexdigest()[:16]


class WandB(Callback):
    """Writes a run of Weights & Biases, offline: into wandb/ of the working folder or of `folder`.

    Nothing is sent, and nobody has to log in. Whoever wants it on a server calls `wandb sync` on it. W&B cannot go on
    with an offline run, so a resumed run is another one, of the same name and group.
    """

    def __init__(self, project: str = "fnrfl", folder: str | Path = ".") -> None:
        _refuse_missing("wandb")
        self.project, self.folder = project, Path(folder)
        self._run: Any = None
        self._alone = True  # whether W&B's process is there for this run only

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Begin an offline run."""
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when its process starts
        import wandb

        from fnrfl.rundir.configs import flat_config

        self._alone = wandb.run is None
        self.folder.mkdir(parents=True, exist_ok=True)
        name = _run_name(config, facts)
        self._run = wandb.init(
            project=self.project,
            dir=str(self.folder),
            name=name,
            group=name,
            config=flat_config(config) | {"config_sha256": config.sha256, "rounds_done_before": facts["rounds_done"]},
            tags=["leak", *config.leaks_on] if config.leaks_on else None,
            reinit="create_new",
            settings=_offline(wandb.Settings),
        )

    def round(self, event: Event) -> None:
        """Log the numbers of a round."""
        self._run.log(scalars(event), step=event["round"])

    def end(self, result: Result) -> None:
        """Write the hash of the model, and finish."""
        self._run.summary["model_sha256"] = result.model_sha256
        self._finish(0)

    def stop(self, error: BaseException) -> None:
        """Finish a run that was stopped or has failed."""
        self._finish(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _finish(self, code: int) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=code)
            if self._alone:
                import wandb

                wandb.teardown()


def _offline(settings: Any) -> Any:
    """Settings under which W&B only writes what it is given; those that a version does not have are left out."""
    wanted = {
        "mode": "offline", "silent": True, "console": "off", "disable_git": True, "disable_code": True,
        "save_code": False, "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True,
        "x_save_requirements": False, "x_disable_viewer": True,
    }  # fmt: skip
    return settings(**{name: value for name, value in wanted.items() if name in settings.model_fields})


LOGGERS: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
