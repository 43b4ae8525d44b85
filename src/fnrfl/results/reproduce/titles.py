"""The tables by name, with what each shows and what must be known whatever its results are.

It imports next to nothing, so the command line can list the tables at once.
"""

from collections.abc import Iterator
from pathlib import Path

HERE = Path("runs") / "reproduction" / "lines.jsonl"  # where results go that are computed on this machine
TITLES = {
    "accuracy": "Test accuracy under single skews (the paper's tab:Exp1)",
    "convergence": "Accuracy by round (the paper's convergence figure)",
    "cost": "Traffic, time, kappa and rho (the paper's tab:cost)",
    "mixed": "Test accuracy under mixed skews (the paper's tab:Exp2)",
    "orthogonality": "FNR around other methods (the paper's tab:Exp_or, and the methods that it did not try)",
    "noise": "Effect of noise (the paper's tab:Exp_noise)",
    "attribution": "Which leak gives what: the paper's settings, one leak at a time",
    "controls": "What public data gives without FNR's penalty",
    "rate": "At the learning rate that the paper prints, 0.1",
    "released-net": "With the ResNet-50 that the released code builds where the paper says ResNet-18",
    "niid-bench": "NIID-Bench's published table (simple-cnn, 50 rounds at full scale)",
    "claims": "The paper's claims, each with a verdict",
}


def scale_note(scale: str, table: str = "") -> str:
    """How large the runs are."""
    if (table, scale) == ("niid-bench", "full"):
        return "Scale full: NIID-Bench's size, 50 rounds of ten local epochs."
    return {
        "tiny": "Scale tiny: digits and small nets. It shows that the recipes run, and nothing about the paper.",
        "quick": "Scale quick: CIFAR-10, ten rounds of two local epochs and one epoch of refinement.",
        "full": "Scale full: the paper's size, ten rounds of ten local epochs and five epochs of refinement.",
    }[scale]


def table_notes(name: str) -> Iterator[str]:
    """What must be known about a table whatever its results are."""
    when = "each round" if name == "convergence" else "the last round"
    yield f"Accuracy is on the test set after {when}; over several seeds mean ± standard deviation."
    if name == "controls":
        yield (
            "public-returned: FedAvg whose clients have the public data back; public-finetune: FedAvg whose average "
            "the server trains on it; public-share: FedAvg whose clients all train on it too; public-only: the server "
            "trains on it, without any client. FNR with weight 0 is FNR without its penalty."
        )
    if name in ("accuracy", "convergence", "mixed", "noise", "orthogonality", "cost", "rate"):
        yield (
            "Where there is noise, FNR is scored on clean test images and the others on noisy ones under the paper's "
            "protocol; under the honest protocol all are scored on noisy ones."
        )
        yield "What was printed for FNR was made with these leaks too, as far as the released code shows."
