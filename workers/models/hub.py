"""Models on the Hugging Face hub: download one commit of a repository into the hub's cache.

huggingface_hub downloads files and manages the cache. This module turns its errors into ModelError
without secrets.
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
SECRET_PATTERN = re.compile(
    r"(?i:bearer)\s+\S+|\bhf_\w+|(?<=://)[^/@\s]+@|(?<=\w)\?\S+"
)
#: Pattern of files in folders that hold no part of a sentence-transformers model, such as onnx.
OTHER_FOLDERS = "[!0-9]*/*"
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


# The library's warnings contain signed URLs, and its HTTP client logs every request.
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)
if not sys.stderr.isatty():
    disable_progress_bars()


def download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the files of a model that match the patterns, and not those in other folders than
    modules'.

    revision: branch, tag or commit; None is the main branch. Return the folder in the cache, whose
    name is the commit. Raises ModelError.
    """
    offline = is_offline_mode()
    name = model
    if revision is not None:
        name = f"{model} at revision {revision!r}"
    if offline:
        source = f"the cache {constants.HF_HUB_CACHE}"
    else:
        source = _without_secrets(constants.ENDPOINT)
    if not offline:
        logger.info("requesting the model %s from %s", name, source)
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
        text = _without_secrets(str(error.__cause__ or error))
        reason = text or type(error).__name__
        if offline:
            advice = "Start once without HF_HUB_OFFLINE, or copy the cache from another machine."
        else:
            advice = (
                "Check FEEDMILL_MODEL (a folder, or owner/name, such as "
                "facebook/bart-large-mnli), FEEDMILL_REVISION, the network, HF_ENDPOINT, HF_TOKEN "
                "(for private and gated models) and the space in HF_HOME. HF_HUB_OFFLINE=1 uses "
                "only the cache."
            )
        raise ModelError(
            f"There is no model folder {model}, and {name} is not available from {source}: "
            f"{reason[:MAX_REASON].rstrip(' .')}. {advice}"
        ) from None
    logger.info("the model %s is at commit %s", name, Path(folder).name)
    return Path(folder)


def announced_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the hub announced for a file in its cache, or None.

    In the cache, each file is a link to a file that is named by its SHA-256.
    """
    if not file.is_symlink():
        return None
    content = file.readlink().name
    return content if SHA256_PATTERN.fullmatch(content) else None


def _without_secrets(text: str) -> str:
    token = os.environ.get("HF_TOKEN", "").strip()
    if token:
        text = text.replace(token, "***")
    line = " ".join(text.split())
    return printable(SECRET_PATTERN.sub("***", line))
