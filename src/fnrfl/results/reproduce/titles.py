"""The tables by name, with what each shows; it imports next to nothing, so the command line can list them at once."""

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
