"""Reserve messages under leases: the Redis transport for kombu, and the messages that a process
holds.
"""
