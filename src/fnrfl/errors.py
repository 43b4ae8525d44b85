"""Everything fnrfl says when it refuses to go on. Each message names the value, the rule and the way out."""

from __future__ import annotations


class FnrflError(Exception):
    """Base of all errors that are meant for people; `exit_code` is what the command line returns."""

    exit_code = 3


class ConfigError(FnrflError):
    """A value that cannot be right: unknown key, wrong type or range, unreadable file."""

    exit_code = 2


class CompatibilityError(FnrflError):
    """Values that are right alone and cannot go together, such as a method and a data set without public labels."""

    exit_code = 2


class ClientError(FnrflError):
    """A client that failed or produced a number that is not finite."""

    def __init__(self, reason: str, *, client: int, round: int, stage: str, step: int | None = None) -> None:
        self.reason, self.client, self.round, self.stage, self.step = reason, client, round, stage, step
        where = f"client {client}, round {round}, stage {stage}" + ("" if step is None else f", step {step}")
        super().__init__(f"{where}: {reason}")
