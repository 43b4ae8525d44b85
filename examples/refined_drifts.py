"""FNR around FedDyn, with drifts from before and from after refinement, by the paper's protocol: a leak."""

from dataclasses import dataclass

import fnrfl
from fnrfl.algorithms.feddyn import FedDyn
from fnrfl.method import LocalTask, Objective, State


@dataclass(frozen=True)
class Pulled(Objective):
    """Pull a client back by its drift."""

    alpha: float

    def correct(self, grad, params, start, shared, own):
        return grad + self.alpha / own["w"] * (params - start + own["h"])


@dataclass(frozen=True)
class RefinedDrifts(FedDyn):
    """FedDyn with h_i <- h_i + (z_i - x). The server keeps all h_i: a client renews nothing after refinement."""

    def client_state(self, net):
        return {}

    def init(self, net):
        return State(*net.flatten(), {"h": net.zeros().expand(10, -1).clone()})  # [N, P], of ten clients

    def round(self, state, cohort, engine):
        x, h, n = state.params, state.extra["h"].clone(), engine.examples
        w = (n / n.mean()).clamp(min=self.smallest).to(x.dtype)
        task = LocalTask(Pulled(self.alpha), "local", state, own={"w": w[cohort], "h": h[cohort]})

        def moved(r):
            return {"moved": r.params - x}  # r.params are z_i

        got = engine.fold(cohort, task, mean=moved, uniform=True, rows=moved)
        h[got.clients] += got.rows["moved"]
        return state.step(got, x + got.mean["moved"] + h.mean(0), h=h)


def accuracy(method, **keys):
    """Return the accuracy of a run of the digits."""
    return fnrfl.run("digits", algorithm=method, fnr="on", protocol="paper", out=None, **keys).accuracy  # a leak


before, after, larger = accuracy("feddyn"), accuracy(RefinedDrifts()), accuracy("feddyn", **{"algorithm.alpha": 0.1})
print(f"leak: drifts before refinement {before:.3f}, after {after:.3f}; before, with a larger alpha {larger:.3f}")
assert before < larger < after == accuracy("fedavg") == 1.0
