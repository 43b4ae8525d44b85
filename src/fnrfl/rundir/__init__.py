"""The run directory: its files, and how it is written, locked, replaced, stopped and resumed."""
