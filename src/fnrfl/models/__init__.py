"""The networks that a run can name, and models of the user's own."""
