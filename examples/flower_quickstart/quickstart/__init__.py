"""A small Flower app in PyTorch."""
