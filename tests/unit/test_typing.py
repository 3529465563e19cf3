"""Type checkers of applications see the package's types."""

import re
import subprocess
import sys
from pathlib import Path

APPLICATION = """\
import feedmill
import polars

frame = polars.DataFrame({"text": ["x"]})
reveal_type(feedmill.classify("x"))
reveal_type(feedmill.classify({"title": "x"}, ["a", "b"]))
reveal_type(feedmill.classify(["x"], scores=False))
reveal_type(feedmill.classify(frame, scores=True))
classifier = feedmill.Classifier(device="cpu")
reveal_type(classifier("x"))
reveal_type(classifier(["x"]))
reveal_type(classifier.classify(frame))
run = feedmill.submit(frame, ["a", "b"])
reveal_type(run.results())
items = [item for item in feedmill.results() if isinstance(item, feedmill.Result)]
reveal_type(items[0].classification.label)
feedmill.classify(["x"], labels=5)
"""

#: Large packages that take minutes to analyse and have no part in these types.
OTHERS = (
    "celery", "kombu", "redis", "rich", "typer", "torch", "transformers", "feedmill.workers",
    "feedmill.producers",
    "feedmill.cli", "IPython", "PIL", "fastapi", "huggingface_hub", "hypothesis", "matplotlib",
    "multiprocessing",
    "numpy", "pandas", "prompt_toolkit", "pyarrow", "pydantic_settings", "tokenizers",
)  # fmt: skip
CONFIGURATION = f"""\
[mypy]
python_version = 3.11
[mypy-{",".join(f"{package}.*" for package in OTHERS)}]
follow_imports = skip
follow_imports_for_stubs = True
"""


def test_applications_see_types(tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=mypy.ini",
        "--cache-dir=cache",
        "application.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "import-untyped" not in done.stdout
    revealed = [
        name.rpartition(".")[2]
        for name in re.findall(r'Revealed type is "(.+)"', done.stdout)
    ]
    assert revealed == [
        "Prediction", "Prediction", "Predictions", "DataFrame", "Prediction", "Predictions",
        "DataFrame",
        "Predictions", "str | None",
    ], done.stdout  # fmt: skip
    assert re.search(
        r'application\.py:17: error: No overload variant of "classify"', done.stdout
    ), done.stdout
    assert done.stdout.count(": error:") == 1, done.stdout
