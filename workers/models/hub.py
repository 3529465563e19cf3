"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub downloads files and manages the cache. This module turns its errors into ModelError without secrets.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, is_offline_mode, snapshot_download
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from feedmill.shared.errors import ModelError, printable

logger = logging.getLogger(__name__)

#: Maximum characters of a library's error in ours.
MAX_REASON = 300
#: Secrets that the library's errors may quote: tokens, passwords in URLs, signatures.
SECRET_PATTERN = re.compile(r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+")
#: Pattern of files in folders that hold no part of a sentence-transformers model, such as onnx.
OTHER_FOLDERS = "[!0-9]*/*"
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


# The library's warnings contain signed URLs, and its HTTP client logs every request.
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)
if not sys.stderr.isatty():
    disable_progress_bars()


def download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the files of a model that match the patterns, and not those in other folders than modules'.

    revision: branch, tag or commit; None is the main branch. Return the folder in the cache, whose name is the commit.
    Raises ModelError.
    """
    offline = is_offline_mode()
    wanted = model if revision is None else f"{model} at revision {revision!r}"
    source = f"the cache {constants.HF_HUB_CACHE}" if offline else _without_secrets(constants.ENDPOINT)
    if not offline:
        logger.info("requesting the model %s from %s", wanted, source)
    try:
        if revision is not None and ".." in revision:  # the cache uses it in a path
            raise ValueError("git has no such revisions")
        folder = snapshot_download(
            model,
            revision=revision,
            local_files_only=offline,
            allow_patterns=list(patterns),
            ignore_patterns=[OTHER_FOLDERS],
        )
    except Exception as error:  # the library does not wrap every error
        reason = _without_secrets(str(error.__cause__ or error)) or type(error).__name__
        advice = (
            "Start once without HF_HUB_OFFLINE, or copy the cache from another machine."
            if offline
            else "Check FEEDMILL_MODEL (a folder, or owner/name, such as facebook/bart-large-mnli), FEEDMILL_REVISION, "
            "the network, HF_ENDPOINT, HF_TOKEN (for private and gated models) and the space in HF_HOME. "
            "HF_HUB_OFFLINE=1 uses only the cache."
        )
        raise ModelError(
            f"There is no model folder {model}, and {wanted} is not available from {source}: "
            f"{reason[:MAX_REASON].rstrip(' .')}. {advice}"
        ) from None
    logger.info("the model %s is at commit %s", wanted, Path(folder).name)
    return Path(folder)


def announced_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the hub announced for a file in its cache, or None.

    In the cache, each file is a link to a file that is named by its SHA-256.
    """
    content = file.readlink().name if file.is_symlink() else ""
    return content if SHA256_PATTERN.fullmatch(content) else None


def _without_secrets(text: str) -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        text = text.replace(token, "***")
    return printable(SECRET_PATTERN.sub("***", " ".join(text.split())))
