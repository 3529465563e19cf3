"""Label files in this process, without Redis or a worker."""
