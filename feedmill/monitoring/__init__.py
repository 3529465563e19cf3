"""Show the state of the system: status and health, Flower."""
