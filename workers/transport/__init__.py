"""Reserve messages under leases: the Redis transport, its leases and their scripts."""
