"""A run: made from a config, run, forecast, and used afterwards."""
