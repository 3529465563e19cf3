"""The public names of `feedmill`."""

import pkgutil

import feedmill

NAMES = {
    "AsyncClient", "Classification", "Classifier", "ClassifyOptions", "ClassifyTask", "Client",
    "DeadLetterEntry", "DeadLetters", "ExportCounts", "Forgotten", "MessageFailed", "Missed",
    "Post", "PostError", "PostRefused", "Prediction", "Predictions", "Purged",
    "RequestRefused", "Result", "ServerError", "StudyResult", "SubmittedRun", "UserError",
    "__version__", "classify", "classify_task", "dead_letters", "evaluate", "export", "forget",
    "parse_outcomes", "purge", "results", "study", "submit", "train", "tune",
}  # fmt: skip


def test_public_names() -> None:
    assert set(feedmill.__all__) == NAMES
    documented = feedmill.__doc__ or ""
    for name in NAMES - {"__version__"}:
        assert f"`{name}`" in documented


def test_no_package_hides_a_public_function() -> None:
    """Importing a package sets an attribute of `feedmill`, which would replace the function."""
    packages = {module.name for module in pkgutil.iter_modules(feedmill.__path__)}
    assert packages.isdisjoint(NAMES)
