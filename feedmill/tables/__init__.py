"""Read and write tables of posts and results as Arrow record batches: CSV, JSONL and Parquet."""

from pathlib import Path

#: Formats by ending, and endings of compressed text files.
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")


def format_of(name: str) -> str | None:
    """Return the format for the ending of a file's name, in any case; None for another ending."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        form = FORMATS.get(Path(path.stem).suffix)
        return None if form == "parquet" else form
    return FORMATS.get(path.suffix)
