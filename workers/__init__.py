"""Where posts are classified. Knows nothing of where they come from."""
