"""FNR in a Flower app that exists already: two lines on the server, two on the client.

    strategy = FeatureNormStrategy(FedAvg())                        # in the ServerApp
    app = ClientApp(mods=[FeatureNormMod(Net, public_loader)])      # in the ClientApp

Flower is imported when one of these names is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fnrfl.flower.mod import FeatureNormMod
    from fnrfl.flower.strategy import FeatureNormStrategy

__all__ = ["FeatureNormMod", "FeatureNormStrategy"]
_HOMES = {"FeatureNormMod": "mod", "FeatureNormStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"fnrfl.flower.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ImportError(f"fnrfl.flower.{name} needs Flower. Install it: pip install 'fnrfl[flower]'.") from error
