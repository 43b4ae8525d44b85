"""Setting up a run: from a config and what was passed in Python to everything that a run is made of."""
