"""Where posts come from. Knows nothing of how they are classified; publishes by task name."""
