"""Settings: who wins, where a value came from, and that every problem is said at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from kvist import settings
from kvist.settings import BusSettings, ListenSettings, Settings, SettingsError, load


class Inner(Settings):
    """A section."""

    limit_ms: int = Field(default=10, ge=1)
    names: tuple[str, ...] = ()


class Outer(Settings):
    """A process's settings."""

    name: str = "none"
    inner: Inner = Inner()
    bus: BusSettings = BusSettings()
    labels: dict[str, str] = Field(default_factory=dict)
    token: SecretStr = SecretStr("")


def test_each_source_beats_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: file\ninner: {limit_ms: 20, names: [a]}\n")
    environment = {"KVIST__NAME": "environment", "KVIST__INNER__NAMES": "b, c", "HOME": "/"}
    loaded = load(Outer, file=file, environment=environment, flags={"name": "flag"})
    assert Outer(name="flag", inner=Inner(limit_ms=20, names=("b", "c"))) == loaded.settings
    origins = {path: origin for path, _, origin in loaded.lines()}
    assert origins["name"] == "flag name"
    assert origins["inner.limit_ms"] == f"file {file}"
    assert origins["inner.names"] == "environment KVIST__INNER__NAMES"
    assert origins["bus.urls"] == "default"


def test_all_problems_are_said_at_once_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("inner: {limit_ms: 0}\nnam: x\n")
    with pytest.raises(SettingsError) as caught:
        load(Outer, file=file, environment={"KVIST__INNER__LIMIT": "1"}, flags={"bus.urls": 7})
    said = {problem.path: problem for problem in caught.value.problems}
    assert {"inner.limit_ms", "nam", "inner.limit", "bus.urls"} == set(said)
    assert said["inner.limit_ms"].origin == f"file {file}"
    assert said["nam"].message == "unknown setting; did you mean 'name'?"
    assert said["inner.limit"].origin == "environment KVIST__INNER__LIMIT"
    assert said["bus.urls"].origin == "flag bus.urls"


@pytest.mark.parametrize("text", ["[", "- a", "\x00"])
def test_a_broken_file_is_one_problem(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(Outer, file=file, environment={})
    assert [problem.path for problem in caught.value.problems] == ["(file)"]


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load(Outer, file=tmp_path / "none.yaml", environment={})


def test_secrets_are_masked() -> None:
    loaded = load(Outer, environment={"KVIST__TOKEN": "tell-nobody"})
    assert loaded.settings.token.get_secret_value() == "tell-nobody"
    assert not any("tell-nobody" in value for _, value, _ in loaded.lines())


def test_mappings_take_any_key_and_json() -> None:
    environment = {"KVIST__LABELS__ZONE": "a", "KVIST__INNER": '{"limit_ms": 5}'}
    assert load(Outer, environment=environment).settings == Outer(labels={"zone": "a"}, inner=Inner(limit_ms=5))


@given(
    host=st.sampled_from(["127.0.0.1", "::1", "localhost", "10.1.2.3", "kvist.example"]),
    port=st.integers(0, 65535),
)
def test_an_address_is_split_as_it_was_joined(host: str, port: int) -> None:
    assert (host, port) == settings.split_address(settings.join_address(host, port))
    assert settings.is_loopback(host) == (host in {"127.0.0.1", "::1", "localhost"})


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:65536", "::1:80"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|brackets"):
        settings.split_address(address)


def test_plain_text_off_loopback_must_be_wanted() -> None:
    with pytest.raises(ValueError, match="not loopback"):
        ListenSettings(listen="10.0.0.1:7000")
    assert ListenSettings(listen="10.0.0.1:7000", insecure=True).insecure
    with pytest.raises(ValueError, match="go together"):
        ListenSettings(tls_certificate_file=Path("cert.pem"))
    with pytest.raises(ValueError, match="needs tls_certificate_file"):
        ListenSettings(tls_client_ca_file=Path("ca.pem"))
    files = {"tls_certificate_file": Path("cert.pem"), "tls_key_file": Path("key.pem")}
    assert not ListenSettings(listen="10.0.0.1:7000", **files).insecure


def test_a_door_in_the_core_gets_paths_that_hold_in_any_folder() -> None:
    files = {"tls_certificate_file": Path("cert.pem"), "tls_key_file": Path("/k/key.pem")}
    assert ListenSettings(**files, open_services=("health",), reflection=False).core_door() == {
        "tls_certificate_file": str(Path.cwd() / "cert.pem"),
        "tls_key_file": "/k/key.pem",
        "tls_role_uri": "",
        "open_services": ["health"],
        "reflection": False,
    }
