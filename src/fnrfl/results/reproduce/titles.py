"""The tables by name, with what each shows; it imports nothing, so that the command line can list them at once."""

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
    "niid-bench": "NIID-Bench's published table (simple-cnn, 50 rounds at full scale)",
}
CLAIMS_TITLE = "The paper's claims, each with a verdict"
