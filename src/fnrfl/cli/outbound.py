"""Connections that the packages of an extra would make to the outside: what fnrfl switches off, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outbound:
    """One kind of connection."""

    extra: str
    what: str
    where: str
    off: str = ""  # how fnrfl switches it off; empty: it cannot
    advice: str = ""  # what remains for the user

    @property
    def words(self) -> str:
        """Where it goes, whether it is switched off, and what remains for the user, in one line."""
        state = f"off: {self.off}" if self.off else "cannot be switched off by fnrfl"
        return f"{self.where}; {state}{f'. {self.advice}' if self.advice else ''}"


OUTBOUND = (
    Outbound("flower", "telemetry", "telemetry.flower.ai", "`fnrfl deploy` sets FLWR_TELEMETRY_ENABLED=0",
             "If you type flwr or flower-supernode yourself, even with --help, set it yourself."),
    Outbound("flower", "update check", "api.flower.ai", "`fnrfl deploy` sets FLWR_DISABLE_UPDATE_CHECK=1",
             "With flwr itself, set it yourself."),
    Outbound("flower", "installing an app's packages", "the package index, in a SuperLink started without a flag",
             "`fnrfl deploy` sets FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"),
    Outbound("flower", "apps from the hub", "api.flower.ai, for a name such as @someone/app",
             "`fnrfl deploy` sets FLWR_SUPERGRID_API_URL to an address where nobody listens"),
    Outbound("flower", "flwr login, flwr new, flwr app, flwr chat", "api.flower.ai",
             advice="fnrfl does not use these commands."),
    Outbound("flower", "the federation itself", "from each SuperNode to the SuperLink, and from nowhere else",
             advice="That is its purpose; on loopback with `fnrfl deploy up`."),
    Outbound("ray", "usage reports", "usage-stats.ray.io", "fnrfl sets RAY_USAGE_STATS_ENABLED=0"),
    Outbound("ray", "which cloud this is", "169.254.169.254, metadata.google.internal, by the dashboard's process",
             "where fnrfl starts Ray, it starts no such process",
             "A cluster that you start with `ray start` asks; --include-dashboard=false alone does not stop it."),
    Outbound("mlflow", "telemetry", "config.mlflow-telemetry.io", "fnrfl sets MLFLOW_DISABLE_TELEMETRY, DO_NOT_TRACK"),
    Outbound("wandb", "runs, machine facts, errors", "api.wandb.ai, sentry.io", "fnrfl logs offline, without reports",
             "`wandb sync` sends a run, if you type it."),
    Outbound("tensorboard", "nothing", "no connection, its pages are read from this machine", "there is nothing to do"),
)  # fmt: skip
