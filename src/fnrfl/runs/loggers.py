"""Loggers: callbacks that write a run for TensorBoard, MLflow or Weights & Biases, by those packages' plain calls.

Each logs the config, every number of every round under the round's number, leaks as a tag and the model's hash. The
packages are optional and imported when a run begins. Unless your environment says otherwise, nothing leaves this
machine: W&B runs offline, and MLflow's telemetry and W&B's error reports are off.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices
from fnrfl.rundir.directory import TENSORBOARD
from fnrfl.rundir.events import Event
from fnrfl.runs.callbacks import Callback

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.runs.result import Result


def scalars(event: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """Every number of a round by name, those in sections as section/name; lists, texts and switches are left out.

    >>> scalars({"round": 3, "accuracy": 0.5, "bytes": {"local": {"up": 8}}, "per_class": [0.1], "loss": None})
    {'accuracy': 0.5, 'bytes/local/up': 8}
    """
    found: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and above + name not in ("round", "rounds"):
            found[above + name] = value  # the number of a round is the step
    return found


def named_loggers(names: Iterable[str]) -> list[Callback]:
    """The loggers with these names, each once, as `--log` takes them."""
    for name in (names := dict.fromkeys(names)):
        if name not in LOGGERS:
            raise ConfigError(f'--log "{name}" is not known. {choices(name, LOGGERS)}.')
    return [LOGGERS[name]() for name in names]


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
        self._open: Any = None

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        if self.folder is None and facts["folder"] is None:
            raise ConfigError("This run writes no run directory, so give TensorBoard a folder: TensorBoard('logs').")
        # A run that replaces another is moved to its name with its first checkpoint.
        self._places = [
            Path(run) / TENSORBOARD if self.folder is None else self.folder / _run_name(config, facts)
            for run in (facts["folder"] or "", facts["run_dir"] or "")
        ]
        if self._places[0].is_symlink():
            raise ConfigError(f"{self._places[0]} is a link. Put the folder itself there, or remove it.")
        done, self._open = int(facts["rounds_done"]), None
        toml = "\n".join(f"    {line}" for line in config.to_toml().splitlines())
        self._writer(done + 1).add_text("config", toml, done)
        self._writer().add_text("leaks", ", ".join(config.leaks_on) or "none", done)
        self._writer().flush()

    def round(self, event: Event) -> None:
        writer = self._writer()
        for name, value in scalars(event).items():
            writer.add_scalar(name, value, event["round"])
        writer.flush()

    def end(self, result: Result) -> None:
        self._writer().add_text("model_sha256", result.model_sha256, len(result.rounds))
        self._open.close()

    def stop(self, error: BaseException) -> None:
        if self._open is not None:
            self._open.close()

    def _writer(self, purge: int | None = None) -> Any:
        """Return the open writer, or a new one whose steps from `purge` on replace those of older files."""
        from torch.utils.tensorboard import SummaryWriter

        if self._open is not None and not self._places[0].exists():
            self._open, self._places = None, self._places[::-1]
        if self._open is None:
            self._open = SummaryWriter(str(self._places[0]), purge_step=purge, filename_suffix=".fnrfl")
        return self._open


class MLflow(Callback):
    """Logs to an MLflow store, by default the database mlflow.db in the working folder, which `mlflow ui` shows.

    `store` is another one, as MLflow writes it: sqlite:///runs.db. A resumed run is another run of the same name.
    """

    def __init__(self, store: str | None = None, experiment: str = "fnrfl") -> None:
        _refuse_missing("mlflow")
        self.store = store or f"sqlite:///{Path.cwd() / 'mlflow.db'}"  # the whole path: MLflow remembers these words
        if self.store.startswith("sqlite:") and importlib.util.find_spec("alembic") is None:
            raise ConfigError("MLflow's database needs sqlalchemy and alembic. Run `pip install sqlalchemy alembic`.")
        self.experiment = experiment

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        for switch in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):  # read when mlflow is imported
            os.environ.setdefault(switch, "true")
        import mlflow

        from fnrfl.rundir.configs import flat_config

        self._mlflow = mlflow
        mlflow.set_tracking_uri(self.store)
        mlflow.set_experiment(self.experiment)
        tags = {"config_sha256": config.sha256, "run_dir": facts["run_dir"], "leak": ", ".join(config.leaks_on) or None}
        mlflow.start_run(run_name=_run_name(config, facts), tags={k: str(v) for k, v in tags.items() if v is not None})
        mlflow.log_params(flat_config(config))

    def round(self, event: Event) -> None:
        numbers = {re.sub(r"[^\w./: -]", "_", name, flags=re.A): value for name, value in scalars(event).items()}
        self._mlflow.log_metrics(numbers, step=event["round"])

    def end(self, result: Result) -> None:
        self._mlflow.set_tag("model_sha256", result.model_sha256)
        self._mlflow.end_run()

    def stop(self, error: BaseException) -> None:
        self._mlflow.end_run("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")


class WandB(Callback):
    """Writes a run of Weights & Biases into wandb/ of the working folder or of `folder`.

    It is offline, and `wandb sync` sends it, unless the variable WANDB_MODE says otherwise. A resumed run is another
    one, of the same name and group.
    """

    def __init__(self, project: str = "fnrfl", folder: str | Path = ".") -> None:
        _refuse_missing("wandb")
        self.project, self.folder = project, Path(folder)
        self._run: Any = None

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when its process starts
        import wandb

        from fnrfl.rundir.configs import flat_config

        self.folder.mkdir(parents=True, exist_ok=True)
        name = _run_name(config, facts)
        self._run = wandb.init(
            project=self.project,
            dir=str(self.folder.resolve()),  # W&B's process may have begun elsewhere
            name=name,
            group=name,
            config=flat_config(config) | {"config_sha256": config.sha256, "rounds_done_before": facts["rounds_done"]},
            tags=["leak", *config.leaks_on] if config.leaks_on else None,
            reinit="create_new",
            mode=None if "WANDB_MODE" in os.environ else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def round(self, event: Event) -> None:
        self._run.log(scalars(event), step=event["round"])

    def end(self, result: Result) -> None:
        self._run.summary["model_sha256"] = result.model_sha256
        self._run.finish()

    def stop(self, error: BaseException) -> None:
        if self._run is not None:
            self._run.finish(exit_code=130 if isinstance(error, KeyboardInterrupt) else 1)


LOGGERS: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
