"""Read results and dead letters from Redis."""
