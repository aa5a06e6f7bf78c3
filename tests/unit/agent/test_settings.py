"""Settings of the agent: where its workers listen, and by what address others reach them."""

import pytest

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.settings import SettingsError, load
from kvist_agent.reach import reached_from_elsewhere, reached_here
from kvist_agent.settings import AgentSettings
from kvist_agent.slot import worker_settings
from kvist_worker.settings import WorkerSettings as WorkersOwnSettings


def read(**flags: object) -> AgentSettings:
    return load(AgentSettings, environment={}, flags=flags).settings


def test_workers_listen_on_loopback_unless_told_otherwise() -> None:
    assert read().workers.listen == "127.0.0.1:0"
    assert read(**{"workers.listen_host": "10.0.0.7", "workers.insecure": "true"}).workers.listen == "10.0.0.7:0"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"workers.listen_host": "10.0.0.7"}, "not loopback: give a TLS certificate, or say `insecure: true`"),
        ({"workers.listen_host": "node-1", "workers.insecure": "true"}, "IPv4 or IPv6"),
        ({"workers.listen_host": "::", "workers.insecure": "true"}, "set advertised_host"),
    ],
)
def test_a_host_that_cannot_work_is_refused(flags: dict, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        read(**flags)


def test_a_worker_takes_what_the_agent_tells_it() -> None:
    spec = WorkerSpec(worker_uid="w-0", model="m", engine="sim")
    network = read(**{"workers.listen_host": "fd00::7", "workers.insecure": "true"}).workers
    told = worker_settings(spec, incarnation_floor=0, network=network)
    settings = WorkersOwnSettings(**told)
    assert (settings.grpc_listen, settings.admin_listen) == ("[fd00::7]:0", "[fd00::7]:0")


@pytest.mark.parametrize(
    ("listens", "host", "here", "elsewhere"),
    [
        ("127.0.0.1:7", "node", "127.0.0.1:7", "127.0.0.1:7"),
        ("0.0.0.0:7", "node", "127.0.0.1:7", "node:7"),
        ("[::]:7", "fd00::7", "[::1]:7", "[fd00::7]:7"),
        ("10.0.0.7:7", "", "10.0.0.7:7", "10.0.0.7:7"),
        ("10.0.0.7:7", "node", "10.0.0.7:7", "node:7"),
    ],
)
def test_a_worker_is_reached_by_an_address_that_fits(listens: str, host: str, here: str, elsewhere: str) -> None:
    assert reached_here(listens) == here
    assert reached_from_elsewhere(listens, advertised_host=host) == elsewhere


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10-0-0-7.agents.svc"),
        ("fd00::12", "fd00--12.agents.svc"),
        # Labels of DNS neither begin nor end with a dash.
        ("::1", "0--1.agents.svc"),
        ("fd00::", "fd00--0.agents.svc"),
    ],
)
def test_a_node_may_be_reached_by_the_name_that_dns_gives_its_address(host: str, name: str) -> None:
    assert read(advertised_host=host, advertised_domain="agents.svc").reached_as == name
    assert read(advertised_host=host).reached_as == host


def test_a_domain_wants_an_address() -> None:
    with pytest.raises(SettingsError, match="IPv4 or IPv6"):
        read(advertised_host="node-1", advertised_domain="agents.svc")
