"""Write results to Parquet, CSV or JSONL files."""
