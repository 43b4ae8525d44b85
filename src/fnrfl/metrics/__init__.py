"""Numbers about runs, from their summaries and events alone."""
