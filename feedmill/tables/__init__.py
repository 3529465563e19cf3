"""Read and write tables of posts and results as Arrow record batches: CSV, JSONL and Parquet."""
