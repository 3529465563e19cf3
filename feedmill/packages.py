"""Check that Python imports our packages: their names are common words, and the first match on its path is imported."""

from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "producers", "workers")


def shadowed_package() -> str | None:
    """Return an error message if a module in the script's or the working folder shadows one of ours, else None."""
    for name in PACKAGES:
        spec = find_spec(name)
        own = HOME / name / "__init__.py"
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None:
            return f"The package {name!r} of Feedmill is missing: {own} should exist. Install Feedmill again."
        if found != own:
            hiding = found.parent if found.name == "__init__.py" else found
            return (
                f"{hiding} hides the package {name!r} of Feedmill, because Python finds it first. Rename it, or run "
                "from another folder."
            )
    return None
