"""`kvist certs` makes an authority once, certificates as often as wanted, and keys that only their owner reads."""

import datetime as dt
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.certificates import LOOPBACK, OTHERS, ROLES, SERVERS, CertificateFolder
from kvist.cli.app import app
from kvist.errors import KvistError
from support.certificates import authority, expired


def content(folder: CertificateFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.path.iterdir()}


def test_all_roles_get_a_certificate_that_states_theirs(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path / "pki")
    assert folder.init(hosts=["mesh.example", "10.0.0.7"], trust_domain="mesh.example") == ["ca", *ROLES, *OTHERS]
    seen = {one.name: one for one in folder.seen()}
    assert set(seen) == {"ca", *ROLES, *OTHERS}
    assert seen["nats"].uris == ()
    assert set(seen["nats"].hosts) == set(seen["router"].hosts)
    for role in ROLES:
        assert seen[role].uris == (f"spiffe://mesh.example/kvist/{role}",)
        assert set(seen[role].hosts) == ({*LOOPBACK, "mesh.example", "10.0.0.7"} if role in SERVERS else set())
    assert all(one.is_valid(dt.datetime.now(dt.UTC)) for one in seen.values())


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = authority(tmp_path / "pki")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for file in folder.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if file.suffix == ".key" else 0o644), file.name


def test_what_is_there_stays_and_what_is_missing_comes_back(tmp_path: Path) -> None:
    folder = authority(tmp_path)
    before = content(folder)
    assert folder.init() == []
    assert content(folder) == before
    folder.certificate_file("router").unlink()
    assert folder.init() == ["router"]
    assert {name for name, data in content(folder).items() if data != before[name]} == {"router.crt", "router.key"}


def test_renewing_leaves_the_authority(tmp_path: Path) -> None:
    folder = authority(tmp_path)
    before = content(folder)
    assert folder.init(renew=True) == [*ROLES, *OTHERS]
    same = {name for name, data in content(folder).items() if data == before[name]}
    assert same == {"ca.crt", "ca.key"}


@pytest.mark.parametrize("missing", ["ca.crt", "ca.key"])
def test_half_an_authority_is_never_replaced(tmp_path: Path, missing: str) -> None:
    folder = authority(tmp_path)
    (tmp_path / missing).unlink()
    before = content(folder)
    with pytest.raises(KvistError):
        folder.init(renew=True)
    assert content(folder) == before


def test_a_key_of_another_authority_signs_nothing(tmp_path: Path) -> None:
    folder, other = authority(tmp_path / "one"), authority(tmp_path / "other")
    folder.key_file("ca").write_bytes(other.key_file("ca").read_bytes())
    with pytest.raises(KvistError, match="not the key"):
        folder.init(renew=True)


@pytest.mark.parametrize("wrong", ["", "A b", "a/b"])
def test_a_wrong_trust_domain_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(KvistError, match="trust domain"):
        CertificateFolder(tmp_path).init(trust_domain=wrong)


def test_the_command_shows_what_has_ended_and_what_is_a_strangers(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["certs", "show", str(tmp_path)]).exit_code == 2
    assert run(app, ["certs", "init", str(tmp_path), "--host", "mesh.example"]).exit_code == 0
    shown = run(app, ["certs", "show", str(tmp_path), "--json"])
    assert shown.exit_code == 0
    assert {one["name"] for one in json.loads(shown.stdout)["certificates"] if one["valid"]} == {"ca", *ROLES, *OTHERS}
    stranger = authority(tmp_path / "stranger")
    (tmp_path / "agent.crt").write_bytes(stranger.certificate_file("agent").read_bytes())
    shown = run(app, ["certs", "show", str(tmp_path), "--json"])
    assert shown.exit_code == 1
    assert [one["name"] for one in json.loads(shown.stdout)["certificates"] if not one["valid"]] == ["agent"]
    expired(tmp_path)
    assert run(app, ["certs", "show", str(tmp_path)]).exit_code == 1
