"""What the server does about clients that do not answer: the `[network]` section of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fnrfl.core.options import option


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How long the server waits for clients in other processes and on other machines, and what it does without them."""

    on_missing: Literal["fail", "wait", "proceed"] = option(
        "fail", "clients that do not answer: stop the run, ask again until they answer, or go on without them"
    )
    min_share: float = option(0.5, "with proceed: share of those asked that must answer", gt=0, le=1)
    max_share: float = option(1.0, "largest share of all training examples that one site may claim", gt=0, le=1)
    train_deadline: float = option(0.0, "seconds that clients have to train; 0: no limit", ge=0)
    refine_deadline: float = option(0.0, "seconds for refinement and other work on public data; 0: no limit", ge=0)
    measure_deadline: float = option(0.0, "seconds to answer a question about a model; 0: no limit", ge=0)
    retries: int = option(1, "how often a request is sent again before its client counts as missing", ge=0)
    address: str = option("", "of a Ray cluster, such as ray://host:10001; empty: Ray is started here")
    cpus: float = option(1.0, "processor cores that a Ray actor takes", gt=0)
    gpus: float = option(0.0, "GPUs that a Ray actor takes; a fraction shares one", ge=0)

    def deadline(self, *, private: bool) -> float | None:
        """Seconds for a training request, on private data or on other data; None: no limit."""
        return (self.train_deadline if private else self.refine_deadline) or None

    def may_proceed(self, answered: int, asked: int) -> bool:
        """Whether the round goes on with those who have answered."""
        return self.on_missing == "proceed" and answered >= 1 and answered >= self.min_share * asked - 1e-9
