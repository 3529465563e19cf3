"""Where posts are classified, and models trained. Knows nothing of where they come from."""
