"""Start and watch processes: the embedded Redis, the supervisor of workers, the demo."""
